// Draws the samples of the feed. Text from the server becomes a text node or an attribute, never markup.
"use strict";

const SILENT_MS = 15000; // if no event arrives for this long, the connection counts as lost
const AGAIN_MS = 2000; // pause before a retry, if the browser does not retry itself
const PAST_S = 900;
const HEIGHT = 210; // of a plot
const GAP_S = 25; // plots show a longer time between two samples as a gap
const DASHES = [[], [9, 4], [2, 3], [10, 3, 2, 3]];
const SIGNS = { good: "✓", warning: "!", bad: "✕" };
const WORDS = { good: "in order", warning: "warning", bad: "error" };

const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // screen readers would read an unchanged text again
}

// -- numbers ------------------------------------------------------------------------------------------------

function short(number) {
  for (const [limit, suffix] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (Math.abs(number) >= limit) return parseFloat((number / limit).toPrecision(3)) + suffix;
  }
  return String(parseFloat(number.toPrecision(3)));
}

const UNITS = {
  percent: (v) => `${parseFloat(v.toFixed(1))} %`,
  per_second: (v) => `${short(v)}/s`,
  gb_per_s: (v) => `${parseFloat(v.toPrecision(3))} GB/s`,
  seconds: (v) => (v < 1 ? `${parseFloat((1000 * v).toPrecision(3))} ms` : `${parseFloat(v.toPrecision(3))} s`),
  count: short,
};
const TITLES = { per_second: ", per second", gb_per_s: ", GB/s" }; // units that the title shows instead of each tick
const TICKS = { ...UNITS, per_second: short, gb_per_s: (v) => String(parseFloat(v.toPrecision(3))) };

function bytes(number) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let step = 0;
  while (number >= 1024 && step < names.length - 1) { number /= 1024; step += 1; }
  return `${parseFloat(number.toPrecision(3))} ${names[step]}`;
}

const clock = (seconds) =>
  new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

// -- history -----------------------------------------------------------------------------------------------

const past = []; // [seconds since 1970, values by plot]

function remember(at, values) {
  if (past.length && at <= past[past.length - 1][0]) return;
  past.push([at, values]);
  while (past[0][0] < at - PAST_S) past.shift();
}

function columns(plot) {
  const times = [], lines = plot.lines.map(() => []);
  let before = null;
  for (const [at, values] of past) {
    if (before !== null && at - before > GAP_S) {
      times.push(before + 1);
      lines.forEach((line) => line.push(null));
    }
    before = at;
    times.push(at);
    lines.forEach((line, i) => line.push(values[plot.key]?.[i] ?? null));
  }
  return [times, ...lines];
}

// -- plots --------------------------------------------------------------------------------------------------

const drawn = []; // all plots: { card, remake() }

function legendLine(number, label, value) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 32 11");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const shape = { x1: 0, x2: 32, y1: 5.5, y2: 5.5, "stroke-width": 2.5, "stroke-dasharray": DASHES[number % 4].join(" ") };
  for (const [key, each] of Object.entries(shape)) line.setAttribute(key, each);
  line.style.stroke = `var(--line-${(number % 4) + 1})`;
  svg.append(line);
  return element("li", {}, svg, document.createTextNode(`${label} `), value);
}

function axes(format, horizontal) {
  const look = { stroke: colour("--faint"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--rule"), width: 1 }, font: "12px system-ui, sans-serif" };
  return [
    { ...look, size: 34, ...horizontal },
    { ...look, size: 62, values: (_, splits) => splits.map((v) => (v === null ? "" : format(v))) },
  ];
}

class Card {
  constructor(title) {
    this.title = element("h2", {}, title);
    this.legend = element("ul", { class: "legend" });
    this.canvas = element("div", { class: "canvas", role: "img" });
    this.note = element("p", { class: "note" });
    this.card = element("div", { class: "card plot" }, this.title, this.legend, this.canvas, this.note);
    this.chart = null;
    new ResizeObserver(() => this.fit()).observe(this.canvas);
  }

  fit() {
    const width = Math.floor(this.canvas.clientWidth);
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  draw(options, data) {
    this.chart?.destroy();
    this.chart = new uPlot({
      width: Math.max(Math.floor(this.canvas.clientWidth), 100), height: HEIGHT,
      legend: { show: false }, ...options,
    }, data, this.canvas);
  }

  line(number, more) {
    return { stroke: colour(`--line-${(number % 4) + 1}`), width: 2, dash: DASHES[number % 4], points: { show: false }, ...more };
  }
}

class TimePlot extends Card {
  constructor(plot) {
    super(plot.title + (TITLES[plot.unit] ?? ""));
    this.plot = plot;
    this.values = plot.lines.map(() => element("b"));
    this.legend.append(...plot.lines.map((label, i) => legendLine(i, label, this.values[i])));
    this.card.dataset.plot = plot.key;
  }

  remake() {
    const { unit, lines } = this.plot;
    this.draw({
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, unit === "percent" ? 100 : Math.max(high || 0, 1e-9) * 1.08] } },
      axes: axes(TICKS[unit], { values: (_, splits) => splits.map(clock), space: 90 }),
      series: [{}, ...lines.map((label, i) => this.line(i, { label }))],
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: { setCursor: [(chart) => this.say(chart.cursor.idx)] },
    }, columns(this.plot));
    this.update();
  }

  update() {
    if (!this.chart) return this.remake();
    this.data = columns(this.plot);
    this.chart.setData(this.data);
    this.say(this.chart.cursor.idx);
    const now = this.plot.lines.map((label, i) => `${label} ${this.values[i].textContent}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.plot.title}: ${now}`);
  }

  say(index) {
    const data = this.data;
    if (!data) return;
    const at = index ?? data[0].length - 1;
    this.values.forEach((node, i) => {
      const value = data[i + 1][at];
      setText(node, value === null || value === undefined ? "–" : UNITS[this.plot.unit](value));
    });
    setText(this.note, index === null || index === undefined ? "" : `at ${clock(data[0][at])}`);
  }
}

class CurvePlot extends Card {
  constructor() {
    super("Hit rate by capacity");
    this.card.dataset.plot = "curve";
    this.value = element("b");
    this.legend.append(legendLine(0, "hit rate with this much memory", this.value), legendLine(1, "at best", this.best = element("b")));
  }

  show(curve) {
    const text = JSON.stringify([curve.capacity_bytes, curve.hit_rate, curve.marks, curve.ceiling]);
    setText(this.note, curve.note);
    if (text === this.shown) return;
    this.shown = text;
    this.curve = curve;
    this.remake();
  }

  remake() {
    const { capacity_bytes: x, hit_rate: y, marks, ceiling } = this.curve;
    this.canvas.hidden = this.legend.hidden = !x.length;
    if (!x.length) return;
    const rates = y.map((rate) => 100 * rate);
    this.draw({
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: [0, 100] } },
      axes: axes(UNITS.percent, {
        space: 70, splits: (_, __, low, high) => powers(low, high, Math.max(this.canvas.clientWidth / 80, 2)),
        filter: (_, splits) => splits, values: (_, splits) => splits.map(bytes),
      }),
      series: [{}, this.line(0, { points: { show: true, size: 6 } }), this.line(1)],
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: {
        draw: [(chart) => this.mark(chart, marks)],
        setCursor: [(chart) => {
          const at = chart.cursor.idx;
          setText(this.value, at === null || at === undefined ? "" : `${UNITS.percent(rates[at])} with ${bytes(x[at])}`);
        }],
      },
    }, [x, rates, x.map(() => 100 * ceiling)]);
    setText(this.best, UNITS.percent(100 * ceiling));
    const points = x.map((capacity, i) => `${bytes(capacity)} ${UNITS.percent(rates[i])}`).join(", ");
    this.canvas.setAttribute("aria-label", `Hit rate by capacity: ${points}`);
  }

  mark(chart, marks) {
    const { ctx, bbox } = chart, ratio = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = colour("--ink");
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    marks.forEach(({ label, capacity_bytes }, i) => {
      const x = chart.valToPos(capacity_bytes, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const text = `${label} ${bytes(capacity_bytes)}`, width = ctx.measureText(text).width + 8 * ratio;
      const left = x + width > bbox.left + bbox.width;
      const y = bbox.top + bbox.height - (10 + 17 * i) * ratio;
      ctx.textAlign = left ? "right" : "left";
      halo(ctx, text, x + (left ? -4 : 4) * ratio, y, 4 * ratio);
    });
    ctx.restore();
  }
}

// Draws text with an outline, so that it can be read over lines.
function halo(ctx, text, x, y, width) {
  ctx.save();
  ctx.setLineDash([]);
  ctx.strokeStyle = colour("--card");
  ctx.lineWidth = width;
  ctx.lineJoin = "round";
  ctx.strokeText(text, x, y);
  ctx.fillStyle = colour("--ink");
  ctx.fillText(text, x, y);
  ctx.restore();
}

function powers(low, high, most) {
  const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high));
  const step = Math.max(Math.ceil((last - first + 1) / most), 1);
  const found = [];
  for (let power = first; power <= last; power += step) found.push(2 ** power);
  return found;
}

// -- tiles, meters, tables --------------------------------------------------------------------------------

// Makes `parent` have one child for each item, and calls `fill(child, item)` for each.
function each(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, i) => {
    if (!parent.children[i]) parent.append(make(item));
    fill(parent.children[i], item);
  });
}

function showConditions(conditions) {
  each(byId("conditions"), conditions, () => element("li", {},
    element("span", { class: "sign", "aria-hidden": "true" }), " ", element("strong"), " ", element("span")),
  (node, { name, state, text }) => {
    node.dataset.state = state;
    const [sign, strong, rest] = node.children;
    setText(sign, SIGNS[state]);
    setText(strong, name);
    setText(rest, `${state === "good" ? "" : `${WORDS[state]}: `}${text}`);
  });
}

function showTiles(tiles) {
  each(byId("tiles"), tiles, () => element("div", {}, element("dt"), element("dd", { class: "value" }), element("dd", { class: "more" })),
    (node, { label, value, note }) => [label, value, note].forEach((text, i) => setText(node.children[i], text)));
}

const meterList = element("div");

function showMeters(meters) {
  byId("meters").hidden = !meters.length;
  if (!meterList.isConnected) byId("meters").append(meterList);
  each(meterList, meters, () => element("div", { class: "meter" },
    element("span", { class: "label" }),
    element("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, element("span")),
    element("span", { class: "text" })),
  (node, { label, share, text }) => {
    const [name, bar, more] = node.children;
    setText(name, label);
    setText(more, text);
    bar.setAttribute("aria-label", label);
    bar.setAttribute("aria-valuenow", Math.round(100 * share));
    bar.setAttribute("aria-valuetext", text);
    bar.firstElementChild.style.width = `${100 * share}%`;
  });
}

function showTables(tables) {
  each(byId("tables"), tables, () => element("section", { class: "card" },
    element("h2"), element("table", {}, element("thead", {}, element("tr")), element("tbody")), element("p", { class: "note" })),
  (node, table) => {
    const [title, grid, note] = node.children;
    setText(title, table.title);
    grid.setAttribute("aria-label", table.title);
    grid.hidden = !table.rows.length;
    setText(note, table.rows.length ? table.note : table.empty);
    const kind = (i) => (i >= table.left ? "number" : "");
    each(grid.tHead.rows[0], table.columns, () => element("th", { scope: "col" }), (cell, text) => setText(cell, text));
    [...grid.tHead.rows[0].cells].forEach((cell, i) => { cell.className = kind(i); });
    each(grid.tBodies[0], table.rows, () => element("tr"), (line, row) => {
      each(line, row, () => element("td", {}, element("span")), (cell, text) => setText(cell.firstElementChild, text));
      [...line.cells].forEach((cell, i) => { cell.className = kind(i); cell.dataset.column = table.columns[i]; });
    });
  });
}

let plotsShown = "";

function showPlots(plots, curve) {
  const text = JSON.stringify([plots, curve !== null]);
  if (text !== plotsShown) {
    plotsShown = text;
    drawn.splice(0);
    drawn.push(...plots.map((plot) => new TimePlot(plot)));
    if (curve) drawn.push(new CurvePlot());
    byId("plots").replaceChildren(...drawn.map((plot) => plot.card));
  }
  for (const plot of drawn) plot instanceof CurvePlot ? plot.show(curve) : plot.update();
}

function show(view) {
  setText(byId("title"), view.title);
  setText(byId("about"), view.about);
  document.title = view.title;
  showConditions(view.conditions);
  showTiles(view.tiles);
  showMeters(view.meters);
  showPlots(view.plots, view.curve);
  showTables(view.tables);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.remake()));

// -- the feed -----------------------------------------------------------------------------------------------

let feed = null, version = null, lastAt = 0, lastHeard = 0, again = 0;

function say(state, text) {
  const link = byId("link");
  link.dataset.state = state;
  setText(link, text);
  document.body.toggleAttribute("data-stale", state === "lost");
}

function lost() {
  say("lost", lastAt ? `no connection, shown as of ${clock(lastAt)}; trying again` : "no connection; trying again");
}

function follow() {
  feed?.close();
  clearTimeout(again);
  if (document.hidden) return; // a hidden dashboard does not count as a viewer
  lastHeard = Date.now();
  feed = new EventSource("feed");
  feed.addEventListener("history", (event) => {
    lastHeard = Date.now();
    for (const [at, values] of JSON.parse(event.data)) remember(at, values);
  });
  feed.addEventListener("sample", (event) => {
    lastHeard = Date.now();
    const [at, values, view] = JSON.parse(event.data);
    if (version !== null && version !== view.version) return location.reload();
    version = view.version;
    lastAt = at;
    remember(at, values);
    show(view);
    say("live", "live");
  });
  feed.addEventListener("error", async () => {
    lost();
    if (feed.readyState !== EventSource.CLOSED) return; // then the browser itself connects again
    clearTimeout(again);
    again = setTimeout(follow, AGAIN_MS);
    const stop = new AbortController(); // fetch reports the status of a refusal, EventSource does not
    const answer = await fetch("feed", { signal: stop.signal }).catch(() => null);
    stop.abort();
    if (answer?.status === 401) location.reload(); // the server then asks for the token
    if (answer?.status === 503) say("lost", "too many dashboards are open; trying again");
  });
}

setInterval(() => {
  if (!document.hidden && Date.now() - lastHeard > SILENT_MS) { lost(); follow(); }
}, 1000);
document.addEventListener("visibilitychange", () => { document.hidden ? feed?.close() : follow(); });
follow();
