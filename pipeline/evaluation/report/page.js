"use strict";
// Values under the pointer, and zoom by dragging over a curve. The drawings are complete without it.
const charts = JSON.parse(document.getElementById("charts")?.textContent ?? "{}");
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${+(value / (letter === "k" ? 1e3 : unit)).toPrecision(4)}${letter}`;
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : `${+value.toPrecision(4)}`;
}

function ticks([low, high], most) {
  const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 2.5, 5, 10].find((each) => each * unit >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - values[low] < values[high] - wanted ? low : high;
}

function activate(box) {
  const chart = charts[box.dataset.chart], svg = box.querySelector("svg");
  if (!chart || !svg) return;
  const [left, top, right, bottom] = box.dataset.area.split(",").map(Number);
  const first = { x: chart.x, y: chart.y };
  let whole = first, view = whole, from = null;
  const drawing = [...svg.children];
  const layer = element("g", { class: "zoomed" }, svg);
  const selection = element("rect", { class: "selection", y: top, height: bottom - top, width: 0 }, svg);
  const cross = element("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" }, svg);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  box.append(tip);

  const toX = (value) => left + ((value - view.x[0]) / (view.x[1] - view.x[0])) * (right - left);
  const toY = (value) => bottom - ((value - view.y[0]) / (view.y[1] - view.y[0])) * (bottom - top);
  const ofX = (place) => view.x[0] + ((place - left) / (right - left)) * (view.x[1] - view.x[0]);
  const place = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return Math.min(right, Math.max(left, point.x));
  };

  function path(x, y) {
    let text = "", pen = false;
    x.forEach((at, i) => {
      if (y[i] === null) { pen = false; return; }
      text += `${pen ? "L" : "M"}${toX(at).toFixed(1)} ${toY(y[i]).toFixed(1)}`;
      pen = true;
    });
    return text;
  }

  function range(x0, x1) {
    let low = Infinity, high = -Infinity;
    for (const line of chart.lines)
      for (const [x, y] of [[line.x, line.raw ?? line.y], line.marks])
        x.forEach((at, i) => {
          if (at < x0 || at > x1 || y[i] === null) return;
          low = Math.min(low, y[i]);
          high = Math.max(high, y[i]);
        });
    if (low > high) return whole.y;
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  function show() {
    const zoomed = view !== whole;
    for (const each of drawing) each.style.display = zoomed ? "none" : "";
    layer.replaceChildren();
    if (!zoomed) return;
    const id = `${box.dataset.chart}-${Math.round(right)}-clip`;
    const clip = element("clipPath", { id }, layer);
    element("rect", { x: left, y: top, width: right - left, height: bottom - top }, clip);
    for (const at of ticks(view.y, 6)) {
      element("line", { class: "grid", x1: left, x2: right, y1: toY(at), y2: toY(at) }, layer);
      element("text", { class: "tick", x: left - 6, y: toY(at) + 4, "text-anchor": "end" }, layer).textContent = short(at);
    }
    for (const at of ticks(view.x, Math.max(2, (right - left) / 90)))
      element("text", { class: "tick", x: toX(at), y: bottom + 18, "text-anchor": "middle" }, layer).textContent = short(at);
    const unit = { class: "tick", x: right, y: bottom + 36, "text-anchor": "end" };
    element("text", unit, layer).textContent = whole === first ? "tokens" : "hours";
    const inside = element("g", { "clip-path": `url(#${id})` }, layer);
    for (const line of chart.lines) {
      const look = { fill: "none", style: `stroke:${line.color}` };
      if (line.raw) element("path", { ...look, d: path(line.x, line.raw), "stroke-width": 0.8, opacity: 0.4 }, inside);
      element("path", { ...look, d: path(line.x, line.y), "stroke-width": 1.8, "stroke-dasharray": line.dash || "none" }, inside);
      line.marks[0].forEach((at, i) => {
        if (line.marks[1][i] !== null)
          element("circle", { cx: toX(at), cy: toY(line.marks[1][i]), r: 3.5, style: `fill:${line.color}` }, inside);
      });
    }
  }

  // Every line has its places on both axes; the wide and the narrow drawing of a chart share its lines.
  function setAxis(unit) {
    for (const line of chart.lines) {
      const [tokens, hours] = charts.clock[line.run], clock = (at) => hours[nearest(tokens, at)];
      line.axes ??= { tokens: [line.x, line.marks[0]], hours: [line.x.map(clock), line.marks[0].map(clock)] };
      [line.x, line.marks[0]] = line.axes[unit];
    }
    const right = 1.02 * Math.max(...chart.lines.map((line) => line.x.at(-1)));
    whole = unit === "tokens" ? first : { x: [0, right], y: chart.y };
    reset();
  }

  function reset() {
    view = whole === first ? whole : { ...whole };
    show();
  }

  function hover(event) {
    const at = place(event), tokens = ofX(at);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    cross.setAttribute("visibility", "visible");
    const rows = chart.lines.flatMap((line) => {
      const i = nearest(line.x, tokens);
      const value = line.y[i];
      if (value === null || tokens > line.x[line.x.length - 1] * 1.02) return [];
      const row = document.createElement("div"), swatch = document.createElement("i");
      swatch.style.background = line.color;
      row.append(swatch, `${line.name} ${short(value)}`);
      return [row];
    });
    const head = document.createElement("div");
    head.textContent = `${short(tokens)} ${whole === first ? "tokens" : "hours"}`;
    tip.replaceChildren(head, ...rows);
    tip.hidden = false;
    const frame = box.getBoundingClientRect(), x = event.clientX - frame.left;
    tip.style.left = `${x + 14 + tip.offsetWidth > frame.width ? Math.max(0, x - 14 - tip.offsetWidth) : x + 14}px`;
    tip.style.top = `${Math.max(0, event.clientY - frame.top - tip.offsetHeight - 8)}px`;
  }

  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    from = place(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    hover(event);
    if (from === null) return;
    const at = place(event);
    selection.setAttribute("x", Math.min(from, at));
    selection.setAttribute("width", Math.abs(at - from));
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, place(event)].sort((a, b) => a - b);
    from = null;
    selection.setAttribute("width", 0);
    if (ends[1] - ends[0] < 6) return;
    const x = ends.map(ofX);
    view = { x, y: range(...x) };
    show();
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cross.setAttribute("visibility", "hidden");
  });
  svg.addEventListener("dblclick", reset);
  document.addEventListener("axis", (event) => setAxis(event.detail));
}

document.querySelectorAll(".plot").forEach(activate);
const buttons = document.querySelectorAll("button.axis");
let axis = "tokens";
for (const button of buttons)
  button.addEventListener("click", () => {
    const other = axis === "tokens" ? "show tokens on the x axis" : "show hours on the x axis";
    axis = axis === "tokens" ? "hours" : "tokens";
    for (const each of buttons) each.textContent = other;
    document.dispatchEvent(new CustomEvent("axis", { detail: axis }));
  });
for (const each of document.querySelectorAll(".hint")) each.hidden = false;
