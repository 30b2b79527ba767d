// Draws the curves of a page again, with the axes, the smoothing and the lines that the reader chooses. A page without
// scripts has the same curves over the steps. Sizes are those of pages.py.
"use strict";
const [WIDTH, LEFT, RIGHT, BOTTOM, TOP, TICKS, EARLY] = [860, 60, 10, 26, 8, 5, 0.1];

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function control(label, element) {
  const around = document.createElement("label");
  around.append(label, element);
  return around;
}

function input(attributes) {
  return Object.assign(document.createElement("input"), attributes);
}

// An axis maps values to places; it has no place for 0 or less if it is logarithmic.
function axisOf(values, start, end, log, zero) {
  const low = zero && !log ? 0 : Math.min(...values), high = Math.max(...values);
  const scale = log ? Math.log10 : Number;
  const place = (value) => start + (scale(value) - scale(low)) / (scale(high) - scale(low) || 1) * (end - start);
  return { low, high, place, ticks: log && high / low >= 10 ? powers(low, high) : rounds(low, high) };
}

function rounds(low, high) {
  const rough = (high - low || 1) / TICKS, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => power * digit >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9), ticks = [];
  for (let index = first; index <= last; index += 1) ticks.push(Number((step * index).toPrecision(12)));
  return ticks;
}

function powers(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), ticks = [];
  const digits = last - first > 3 ? [1] : [1, 2, 5];
  for (let power = first; power <= last; power += 1) ticks.push(...digits.map((digit) => digit * 10 ** power));
  return ticks.filter((value) => value >= low && value <= high);
}

// The average of all earlier values, with weights that decay; it is not pulled towards 0 at the beginning.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    [sum, total] = [weight * sum + value, weight * total + 1];
    return sum / total;
  });
}

// Returns the visible lines over the chosen unit, or over steps if a line has no rate of it, and whether y is logarithmic.
function shownLines(chart, choice) {
  const all = JSON.parse(chart.dataset.lines).filter((line) => !choice.hidden.has(line.colour));
  const unit = all.every((line) => line.rates[choice.x]) ? choice.x : "step";
  const logY = choice.logY && all.every((line) => line.points.every(([, , low]) => low > 0));
  const lines = all.map((line) => {
    const means = smoothed(line.points.map(([, mean]) => mean), choice.smooth);
    const points = line.points.map(([step, , low, high], index) => (
      { x: step * (line.rates[unit] ?? 1), mean: means[index], low, high }
    ));
    return { ...line, points: points.filter((point) => point.x > 0 || !choice.logX) };
  });
  return [lines.filter((line) => line.points.length), unit, logY];
}

function draw(chart, choice) {
  const [lines, unit, logY] = shownLines(chart, choice), height = chart.viewBox.baseVal.height;
  const inside = make("svg", { x: LEFT, y: 0, width: WIDTH - LEFT, height: height - BOTTOM + 4,
    viewBox: `${LEFT} 0 ${WIDTH - LEFT} ${height - BOTTOM + 4}` });
  const all = lines.flatMap((line) => line.points);
  chart.replaceChildren(inside);
  if (!all.length) return;
  const x = axisOf(all.map((point) => point.x), LEFT, WIDTH - RIGHT, choice.logX, true);
  const late = all.filter((point) => point.x >= EARLY * x.high);
  const early = choice.logX || logY || new Set(late.map((point) => point.x)).size < 2;
  const range = (early ? all : late).flatMap((point) => [point.low, point.high]);
  const y = axisOf(range, height - BOTTOM, TOP, logY, false);
  for (const value of y.ticks) {
    const at = y.place(value);
    chart.prepend(make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: "grid" }));
    chart.append(make("text", { x: LEFT - 8, y: at + 4, class: "end" }, String(Number(value.toPrecision(6)))));
  }
  for (const value of x.ticks) {
    const side = value === x.high ? "end" : "middle";
    chart.append(make("text", { x: x.place(value), y: height - 6, class: side }, numberText(value)));
  }
  const at = (value, point) => `${x.place(point.x).toFixed(1)},${y.place(value).toFixed(1)}`;
  for (const { colour, points } of lines) {
    const above = points.map((point) => at(point.high, point)), below = points.map((point) => at(point.low, point));
    if (points.some((point) => point.low < point.high)) {
      inside.append(make("polygon", { points: [...above, ...below.reverse()].join(" "), class: `spread ${colour}` }));
    }
    const mean = points.map((point) => at(point.mean, point)).join(" ");
    inside.append(make("polyline", { points: mean, class: `mean ${colour}` }));
  }
  chart.onpointermove = (event) => read(chart, choice.output, lines, unit, x, event);
}

function numberText(value) {
  return value.toLocaleString("en-US", { notation: value >= 1e5 ? "compact" : "standard", maximumSignificantDigits: 4 });
}

// Shows the values of the lines at their points next to the pointer.
function read(chart, output, lines, unit, x, event) {
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
  const distance = (point) => Math.abs(x.place(point.x) - place);
  const nearest = lines.map(({ points }) => points.reduce((best, point) => distance(point) < distance(best) ? point : best));
  const texts = nearest.map((point, index) => `${lines[index].name} ${Number(point.mean.toPrecision(4))}`);
  output.textContent = `${unit} ${numberText(nearest[0].x)}: ${texts.join(", ")}`;
}

// A line of controls above the first chart of a section, for all charts of the section.
for (const section of document.querySelectorAll("section")) {
  const charts = [...section.querySelectorAll("svg[data-lines]")];
  if (!charts.length) continue;
  const lines = JSON.parse(charts[0].dataset.lines);
  const units = Object.keys(lines[0].rates).filter((unit) => lines.every((line) => line.rates[unit]));
  const x = document.createElement("select");
  x.append(...["step", ...units].map((unit) => new Option(unit)));
  const logX = input({ type: "checkbox" }), logY = input({ type: "checkbox" });
  const smooth = input({ type: "range", min: 0, max: 0.98, step: 0.02, value: 0 });
  const output = document.createElement("output");
  const hidden = new Set();
  const update = () => {
    const choice = { x: x.value, logX: logX.checked, logY: logY.checked, smooth: Number(smooth.value), hidden, output };
    for (const chart of charts) draw(chart, choice);
  };
  const controls = document.createElement("form");
  controls.className = "controls";
  controls.append(control("x ", x), control("log x ", logX), control("log y ", logY), control("smooth ", smooth), output);
  controls.addEventListener("input", update);
  charts[0].before(controls);
  for (const item of section.querySelectorAll(".chart + .legend li")) {
    const colour = item.querySelector(".swatch").className.replace("swatch ", "");
    const toggle = () => {
      if (!hidden.delete(colour)) hidden.add(colour);
      item.setAttribute("aria-pressed", String(!hidden.has(colour)));
      update();
    };
    for (const [name, value] of [["role", "button"], ["tabindex", "0"], ["aria-pressed", "true"]]) item.setAttribute(name, value);
    item.addEventListener("click", toggle);
    item.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  }
  update();
}
