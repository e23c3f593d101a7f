/* Strings of JSON lines, without an object for anything else.
 *
 * `strings(block, keys, required)` goes over the lines of a block. Of a line that is an object with strings under the
 * keys, it makes those strings. A line is passed over whenever there is the least doubt: what is not valid JSON, a key
 * twice or spelt with an escape, half a surrogate pair, a number with an exponent or of more than 15 characters, more
 * than MAX_DEPTH levels. Python then asks orjson, which alone decides what is wrong with a line. So what this file takes
 * must be a part of what orjson takes, with the same strings, and need not be all of it.
 *
 * JSON: RFC 8259. UTF-8: RFC 3629.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MAX_KEYS = 16, MAX_DEPTH = 32, MAX_NUMBER = 15, STEP = 16 };
enum { VERSION = 1 }; /* that jsonl.py asks for: one that was compiled from an older file may lie about */

typedef struct {
    const unsigned char *at, *end; /* what is left of the line */
} Cursor;

typedef struct {
    const char *name;
    Py_ssize_t size;
} Key;

typedef struct {
    Key key[MAX_KEYS];
    int count, required; /* the first ones must be there */
} Keys;

typedef struct {
    const unsigned char *start, *end; /* start is NULL: has not been met */
} Span;

/* Bytes that end a run of plain ones in a string: the quote, the backslash, and what must be escaped. */
static inline bool is_plain(unsigned char c) { return c >= 0x20 && c != '"' && c != '\\'; }

/* The first byte at or behind `p` that is not plain, or `end`. Copies what is before it to `to`, if that is not NULL,
 * and up to STEP - 1 bytes more. */
static inline const unsigned char *pass_plain(const unsigned char *p, const unsigned char *end, unsigned char *to)
{
    const unsigned char *first = p;
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1F);
    for (; end - p >= STEP; p += STEP) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)p);
        __m128i low = _mm_cmpeq_epi8(_mm_min_epu8(bytes, control), bytes); /* unsigned bytes <= 0x1F */
        __m128i hit = _mm_or_si128(low, _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, slash)));
        int mask = _mm_movemask_epi8(hit);
        if (to)
            _mm_storeu_si128((__m128i *)(to + (p - first)), bytes);
        if (mask)
            return p + __builtin_ctz((unsigned)mask);
    }
#endif
    for (; p < end && is_plain(*p); p++)
        if (to)
            to[p - first] = *p;
    return p;
}

static inline void skip_blanks(Cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\r'))
        c->at++;
}

static inline bool take(Cursor *c, unsigned char wanted)
{
    if (c->at == c->end || *c->at != wanted)
        return false;
    c->at++;
    return true;
}

/* The value of four hexadecimal digits, or -1. */
static int hex4(const unsigned char *p, const unsigned char *end)
{
    int value = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        unsigned char c = p[i], letter = c | 0x20;
        if (c >= '0' && c <= '9')
            value = value << 4 | (c - '0');
        else if (letter >= 'a' && letter <= 'f')
            value = value << 4 | (letter - 'a' + 10);
        else
            return -1;
    }
    return value;
}

/* What an escape of one letter stands for, or 0. */
static unsigned char unescaped(unsigned char c)
{
    switch (c) {
    case '"': case '\\': case '/': return c;
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    default: return 0;
    }
}

/* Reads \uXXXX, and a second one if the first is half of a pair. `p` is at the u. Gives the bytes read, 0 if refused. */
static int code_point(const unsigned char *p, const unsigned char *end, uint32_t *code)
{
    int first = hex4(p + 1, end), second;
    if (first < 0 || (first >= 0xDC00 && first <= 0xDFFF))
        return 0;
    *code = (uint32_t)first;
    if (first < 0xD800 || first > 0xDBFF)
        return 5;
    if (end - p < 11 || p[5] != '\\' || p[6] != 'u')
        return 0;
    second = hex4(p + 7, end);
    if (second < 0xDC00 || second > 0xDFFF)
        return 0;
    *code = 0x10000 + (((uint32_t)first - 0xD800) << 10) + ((uint32_t)second - 0xDC00);
    return 11;
}

static unsigned char *put_utf8(unsigned char *to, uint32_t code)
{
    if (code < 0x80) {
        *to++ = (unsigned char)code;
    } else if (code < 0x800) {
        *to++ = (unsigned char)(0xC0 | code >> 6);
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *to++ = (unsigned char)(0xE0 | code >> 12);
        *to++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    } else {
        *to++ = (unsigned char)(0xF0 | code >> 18);
        *to++ = (unsigned char)(0x80 | (code >> 12 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (unsigned char)(0x80 | (code & 0x3F));
    }
    return to;
}

/* Reads a string, from behind its first quote to behind its last. The escapes are checked, the UTF-8 is not.
 * Copies it without its escapes to `to`, if that is not NULL. Gives where the copy ends, or the string; NULL: refused. */
static inline const unsigned char *pass_string(Cursor *c, unsigned char *to)
{
    for (;;) {
        const unsigned char *plain = c->at;
        c->at = pass_plain(plain, c->end, to);
        if (to)
            to += c->at - plain;
        if (c->end - c->at < 1 || *c->at < 0x20)
            return NULL;
        if (*c->at++ == '"')
            return to ? to : c->at - 1;
        if (c->at == c->end)
            return NULL;
        if (*c->at == 'u') {
            uint32_t code;
            int size = code_point(c->at, c->end, &code);
            if (!size)
                return NULL;
            c->at += size;
            if (to)
                to = put_utf8(to, code);
        } else {
            unsigned char letter = unescaped(*c->at++);
            if (!letter)
                return NULL;
            if (to)
                *to++ = letter;
        }
    }
}

/* Whether bytes are UTF-8, without surrogates and in the shortest form. */
static bool is_utf8(const unsigned char *p, const unsigned char *end)
{
    while (p < end) {
        unsigned char c = *p++, low = 0x80, high = 0xBF;
        int more;
        if (c < 0x80)
            continue;
        if (c >= 0xC2 && c <= 0xDF) {
            more = 1;
        } else if (c >= 0xE0 && c <= 0xEF) {
            more = 2;
            low = c == 0xE0 ? 0xA0 : low;
            high = c == 0xED ? 0x9F : high;
        } else if (c >= 0xF0 && c <= 0xF4) {
            more = 3;
            low = c == 0xF0 ? 0x90 : low;
            high = c == 0xF4 ? 0x8F : high;
        } else {
            return false;
        }
        for (; more; more--, low = 0x80, high = 0xBF)
            if (p == end || *p < low || *p++ > high)
                return false;
    }
    return true;
}

/* Goes over a string that nobody wants; `span`: its bytes as they stand. */
static bool skip_string(Cursor *c, Span *span)
{
    span->start = c->at;
    span->end = pass_string(c, NULL);
    return span->end && is_utf8(span->start, span->end);
}

static bool skip_number(Cursor *c)
{
    const unsigned char *start = c->at;
    if (*c->at == '-')
        c->at++;
    if (c->at < c->end && *c->at == '0') {
        c->at++;
    } else {
        const unsigned char *first = c->at;
        while (c->at < c->end && *c->at >= '0' && *c->at <= '9')
            c->at++;
        if (c->at == first)
            return false;
    }
    if (c->at < c->end && *c->at == '.') {
        const unsigned char *first = ++c->at;
        while (c->at < c->end && *c->at >= '0' && *c->at <= '9')
            c->at++;
        if (c->at == first)
            return false;
    }
    return c->at - start <= MAX_NUMBER; /* what follows must be a comma, a bracket or a blank, so an E is refused */
}

static bool skip_word(Cursor *c, const char *word, Py_ssize_t size)
{
    if (c->end - c->at < size || memcmp(c->at, word, (size_t)size) != 0)
        return false;
    c->at += size;
    return true;
}

static bool skip_scalar(Cursor *c)
{
    Span string;
    if (c->at == c->end)
        return false;
    switch (*c->at) {
    case '"': c->at++; return skip_string(c, &string);
    case 't': return skip_word(c, "true", 4);
    case 'f': return skip_word(c, "false", 5);
    case 'n': return skip_word(c, "null", 4);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return skip_number(c);
    default: return false;
    }
}

/* Goes over a key of an object and its colon; `name`: its bytes as they stand. */
static bool skip_key(Cursor *c, Span *name)
{
    skip_blanks(c);
    if (!take(c, '"') || !skip_string(c, name))
        return false;
    skip_blanks(c);
    return take(c, ':');
}

/* Goes over any value. */
static bool skip_value(Cursor *c)
{
    unsigned char open[MAX_DEPTH]; /* the brackets around where we are */
    int depth = 0;
    Span name;
    for (;;) {
        skip_blanks(c);
        if (c->at == c->end)
            return false;
        if (*c->at == '{' || *c->at == '[') {
            unsigned char bracket = *c->at++;
            if (depth == MAX_DEPTH)
                return false;
            open[depth++] = bracket;
            skip_blanks(c);
            if (!take(c, bracket == '{' ? '}' : ']')) {
                if (bracket == '{' && !skip_key(c, &name))
                    return false;
                continue;
            }
            depth--;
        } else if (!skip_scalar(c)) {
            return false;
        }
        for (;;) { /* behind a value */
            if (!depth)
                return true;
            skip_blanks(c);
            if (take(c, ',')) {
                if (open[depth - 1] == '{' && !skip_key(c, &name))
                    return false;
                break;
            }
            if (!take(c, open[depth - 1] == '{' ? '}' : ']'))
                return false;
            depth--;
        }
    }
}

/* Which of the keys a name is, or -1; -2 if it is spelt with an escape. */
static int which_key(const Span *name, const Keys *keys)
{
    size_t size = (size_t)(name->end - name->start);
    for (int i = 0; i < keys->count; i++)
        if (size == (size_t)keys->key[i].size && memcmp(name->start, keys->key[i].name, size) == 0)
            return i;
    return memchr(name->start, '\\', size) ? -2 : -1;
}

/* Goes over a line; true if it is an object with strings under the keys. They are copied to `room`, which has place for
 * the line and STEP bytes for each key. */
static bool scan_line(Cursor c, const Keys *keys, Span *found, unsigned char *room)
{
    int met = 0;
    for (int i = 0; i < keys->count; i++)
        found[i].start = NULL;
    skip_blanks(&c);
    if (!take(&c, '{'))
        return false;
    do {
        Span name;
        int which;
        if (!skip_key(&c, &name))
            return false;
        which = which_key(&name, keys);
        if (which == -1) {
            if (!skip_value(&c))
                return false;
        } else {
            skip_blanks(&c);
            if (which < 0 || found[which].start || !take(&c, '"'))
                return false;
            found[which].start = room;
            found[which].end = pass_string(&c, room);
            if (!found[which].end)
                return false;
            room += found[which].end - found[which].start + STEP;
            met += which < keys->required;
        }
        skip_blanks(&c);
    } while (take(&c, ','));
    if (!take(&c, '}'))
        return false;
    skip_blanks(&c);
    return c.at == c.end && met == keys->required;
}

/* A str, or None where nothing was found; NULL without an error if the bytes are not UTF-8, with one if there is no
 * memory. */
static PyObject *make_string(const Span *span)
{
    PyObject *made = Py_None;
    if (!span->start) {
        Py_INCREF(made);
        return made;
    }
    made = PyUnicode_DecodeUTF8((const char *)span->start, span->end - span->start, "strict");
    if (!made && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        PyErr_Clear();
    return made;
}

/* Appends a line's strings to the columns; None to each if the line was passed over. */
static int add_line(Cursor line, const Keys *keys, PyObject **columns, unsigned char *room)
{
    Span found[MAX_KEYS];
    PyObject *made[MAX_KEYS];
    int have = 0, failed;
    if (scan_line(line, keys, found, room))
        while (have < keys->count && (made[have] = make_string(&found[have])))
            have++;
    failed = PyErr_Occurred() ? -1 : 0;
    for (int i = 0; i < keys->count && !failed; i++)
        failed = PyList_Append(columns[i], have == keys->count ? made[i] : Py_None);
    while (have)
        Py_DECREF(made[--have]);
    return failed;
}

/* Reads the lines of a block into the columns; gives the places where lines start, as bytes of int64. */
static PyObject *read_block(const Py_buffer *block, const Keys *keys, PyObject **columns)
{
    const unsigned char *start = block->buf, *end = start + block->len, *line = start, *stop;
    Py_ssize_t lines = 0, most = 64;
    unsigned char *room = PyMem_Malloc((size_t)block->len + MAX_KEYS * STEP);
    int64_t *starts = PyMem_Malloc((size_t)most * sizeof *starts);
    PyObject *made = NULL;
    if (!room || !starts)
        goto done;
    for (; line < end; line = stop + 1) {
        stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop ? stop : end;
        if (lines == most) {
            int64_t *grown = PyMem_Realloc(starts, (size_t)(most *= 2) * sizeof *starts);
            if (!grown)
                goto done;
            starts = grown;
        }
        starts[lines++] = line - start;
        if (add_line((Cursor){line, stop}, keys, columns, room))
            goto done;
    }
    made = PyBytes_FromStringAndSize((const char *)starts, lines * (Py_ssize_t)sizeof *starts);
done:
    PyMem_Free(room);
    PyMem_Free(starts);
    if (!made && !PyErr_Occurred())
        PyErr_NoMemory();
    return made;
}

static bool read_keys(PyObject *given, Keys *keys)
{
    Py_ssize_t count = PyTuple_Size(given);
    if (count < 1 || count > MAX_KEYS || keys->required < 1 || keys->required > count) {
        PyErr_Format(PyExc_ValueError, "%zd keys, %d required: 1 to %d can be read", count, keys->required, MAX_KEYS);
        return false;
    }
    keys->count = (int)count;
    for (int i = 0; i < keys->count; i++) {
        keys->key[i].name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(given, i), &keys->key[i].size);
        if (!keys->key[i].name)
            return false;
        if (memchr(keys->key[i].name, '\\', (size_t)keys->key[i].size)) {
            PyErr_SetString(PyExc_ValueError, "a key with a backslash: it is escaped in every line");
            return false;
        }
    }
    return true;
}

PyDoc_STRVAR(strings_doc,
             "strings(block, keys, required, /)\n--\n\n"
             "The strings under each key in the lines of a block.\n\n"
             "Returns: a tuple with a list for each key, of a str or None for each line, and where the lines start,\n"
             "bytes of int64. None under the first key: the line was passed over. The first `required` keys are in\n"
             "all lines that were not, another one need not be.");

static PyObject *strings(PyObject *module, PyObject *args)
{
    Py_buffer block;
    PyObject *given, *columns[MAX_KEYS], *starts = NULL, *found = NULL;
    Keys keys;
    int made = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O!i:strings", &block, &PyTuple_Type, &given, &keys.required))
        return NULL;
    if (read_keys(given, &keys)) {
        while (made < keys.count && (columns[made] = PyList_New(0)))
            made++;
        if (made == keys.count)
            starts = read_block(&block, &keys, columns);
    }
    if (starts && (found = PyTuple_New(keys.count + 1))) {
        PyTuple_SetItem(found, keys.count, starts);
        for (; made; made--)
            PyTuple_SetItem(found, made - 1, columns[made - 1]);
    } else {
        Py_XDECREF(starts);
    }
    while (made)
        Py_DECREF(columns[--made]);
    PyBuffer_Release(&block);
    return found;
}

static PyMethodDef methods[] = {{"strings", strings, METH_VARARGS, strings_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jsonl", "Strings of JSON lines; see _jsonl.c.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jsonl(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "VERSION", VERSION) ||
                   PyModule_AddIntConstant(module, "MAX_KEYS", MAX_KEYS))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
