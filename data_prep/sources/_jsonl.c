/* JSON Lines parser that creates Python strings for the requested keys only, and no other objects.
 *
 * `strings(block, keys, required)` parses the lines of a block. For a line that is an object with strings under the
 * keys, it creates those strings. It skips a line in any doubtful case: invalid JSON, a duplicate key or one with an
 * escape, an unpaired surrogate, a number with an exponent or of more than MAX_NUMBER characters, more than MAX_DEPTH
 * nested values. Python parses skipped lines with orjson, which alone reports what is wrong with a line. So the lines
 * accepted here must be a subset of those that orjson accepts, with the same strings.
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
enum { VERSION = 1 }; /* checked by jsonl.py: a library compiled from an older file may still be installed */

typedef struct {
    const unsigned char *at, *end; /* the rest of the line */
} Cursor;

typedef struct {
    const char *name;
    Py_ssize_t size;
} Key;

typedef struct {
    Key key[MAX_KEYS];
    int count, required; /* the first `required` keys must be present */
} Keys;

typedef struct {
    const unsigned char *start, *end; /* start is NULL if not found yet */
} Span;

/* Whether a byte of a string stands for itself: not the quote, the backslash or a control character. */
static inline bool is_plain(unsigned char c) { return c >= 0x20 && c != '"' && c != '\\'; }

/* Returns the first byte from `p` on that is not plain, or `end`. Copies the bytes before it to `to`, if that is not
 * NULL, and up to STEP - 1 bytes more. */
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

/* The character of a one-letter escape, or 0 if there is no such escape. */
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

/* Parses \uXXXX, and a second one after a high surrogate. `p` is at the u. Returns the bytes read, 0 if invalid. */
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

/* Parses a string, from after its opening quote to after its closing one. Validates escapes, not UTF-8.
 * Copies it unescaped to `to`, if that is not NULL. Returns the end of the copy, or of the string; NULL if invalid. */
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

/* Whether the bytes are valid UTF-8: no surrogates, no overlong forms. */
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

/* Skips a string that was not requested; `span` is set to its raw bytes. */
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
    return c->at - start <= MAX_NUMBER; /* callers require a comma, bracket or blank next, so an E is rejected */
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

/* Skips a key of an object and its colon; `name` is set to its raw bytes. */
static bool skip_key(Cursor *c, Span *name)
{
    skip_blanks(c);
    if (!take(c, '"') || !skip_string(c, name))
        return false;
    skip_blanks(c);
    return take(c, ':');
}

/* Skips a value of any type. */
static bool skip_value(Cursor *c)
{
    unsigned char open[MAX_DEPTH]; /* stack of the enclosing brackets */
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
        for (;;) { /* after a value */
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

/* Index of a name among the keys; -1 if it is none of them; -2 if it is written with an escape. */
static int which_key(const Span *name, const Keys *keys)
{
    size_t size = (size_t)(name->end - name->start);
    for (int i = 0; i < keys->count; i++)
        if (size == (size_t)keys->key[i].size && memcmp(name->start, keys->key[i].name, size) == 0)
            return i;
    return memchr(name->start, '\\', size) ? -2 : -1;
}

/* Parses a line; true if it is an object with strings under the keys. They are copied to `room`, whose size is that of
 * the line plus STEP bytes for each key. */
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

/* A str, or None if the key was not found; NULL without an exception if the bytes are not UTF-8, with one if memory
 * is exhausted. */
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

/* Appends the strings of a line to the columns, or None to each of them if the line is skipped. */
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

/* Parses the lines of a block into the columns; returns the offsets at which lines start, as bytes of int64. */
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
             "Parses the lines of a block and returns the strings under each key.\n\n"
             "Returns: a tuple of a list for each key, with a str or None for each line, and the offsets at which\n"
             "lines start, as bytes of int64. None under the first key means that the line was skipped. The first\n"
             "`required` keys are present in every line that was not skipped; the others are optional.");

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
