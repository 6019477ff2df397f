/** Line charts of the last two minutes. */

import { drawing, element } from "./dom.js";
import { NOTHING } from "./format.js";

const SPAN = 120; // seconds
// Samples that are further apart than this, in seconds, are not connected by a line.
const LONGEST_GAP = 5;
const HEIGHT = 104;
const LEFT = 36;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** A chart of one or two series over time, with the newest values as text. */
export class Chart {
  #samples = [];
  #width = 0;
  #chosen = null;

  /**
   * `series` contains the `name` and the function `value(stats)` of each line. `format` converts a
   * value to text, to which `unit` is appended. `least` is the minimum of the axis' upper end.
   */
  constructor({ title, unit, series, format, least }) {
    this.title = title;
    this.unit = unit;
    this.series = series;
    this.format = format;
    this.least = least;
    this.svg = drawing("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT });
    this.when = element("span", { class: "when" });
    this.values = series.map((each, index) => {
      const value = element("span", { class: "value" }, NOTHING);
      const key = element("span", { class: `key line-${index}` });
      const name = series.length > 1 ? [key, element("span", { class: "name" }, each.name)] : [];
      return { value, box: element("span", { class: "reading" }, ...name, value) };
    });
    this.element = element(
      "figure",
      { class: "chart" },
      element(
        "figcaption",
        {},
        element("span", { class: "title" }, title, this.when),
        element(
          "span",
          { class: "readings" },
          ...this.values.map(({ box }) => box),
          element("span", { class: "unit" }, unit),
        ),
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.#choose(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#leave());
    this.svg.addEventListener("blur", () => this.#leave());
    this.svg.addEventListener("keydown", (event) => this.#walk(event));
    new ResizeObserver(([entry]) => {
      this.#width = entry.contentRect.width;
      this.#draw();
    }).observe(this.svg);
  }

  get length() {
    return this.#samples.length;
  }

  /** Add a sample. `time` is in seconds of a monotonic clock. */
  add(time, stats) {
    const values = this.series.map((each) => {
      const value = each.value(stats);
      return Number.isFinite(value) ? value : null;
    });
    this.#samples.push({ time, values });
    while (this.#samples[0].time < time - SPAN) this.#samples.shift();
    if (this.#chosen && !this.#samples.includes(this.#chosen)) this.#chosen = null;
    this.#draw();
  }

  #x(time) {
    const age = this.#samples.at(-1).time - time;
    return this.#width - RIGHT - (age / SPAN) * (this.#width - LEFT - RIGHT);
  }

  #choose(x) {
    if (this.#samples.length === 0) return;
    const distance = (sample) => Math.abs(this.#x(sample.time) - x);
    this.#chosen = this.#samples.reduce((one, other) =>
      distance(other) < distance(one) ? other : one,
    );
    this.#draw();
  }

  #leave() {
    this.#chosen = null;
    this.#draw();
  }

  #walk(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || this.#samples.length === 0) return;
    event.preventDefault();
    const last = this.#samples.length - 1;
    const now = this.#chosen ? this.#samples.indexOf(this.#chosen) : last;
    this.#chosen = this.#samples[Math.min(last, Math.max(0, now + step))];
    this.#draw();
  }

  #draw() {
    if (this.#width <= LEFT + RIGHT) return;
    const newest = this.#samples.at(-1);
    const shown = this.#chosen ?? newest;
    this.#read(shown, newest);
    const most = Math.max(this.least, ...this.#samples.flatMap(({ values }) => values));
    const step = niceStep(most);
    const top = Math.ceil(most / step - 1e-9) * step;
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (let tick = 0; tick <= top + step / 2; tick += step) {
      parts.push(line("grid", LEFT, y(tick), this.#width - RIGHT, y(tick)));
      parts.push(label("end", LEFT - 6, y(tick) + 3.5, tickText(tick, step)));
    }
    const foot = HEIGHT - 5;
    parts.push(label("start", LEFT, foot, "2 min ago"));
    parts.push(label("middle", (LEFT + this.#width - RIGHT) / 2, foot, "1 min"));
    parts.push(label("end", this.#width - RIGHT, foot, "now"));
    this.series.forEach((_, index) => {
      for (const run of runs(this.#samples, index)) {
        const points = run.map((each) => [this.#x(each.time), y(each.values[index])]);
        if (index === 0) parts.push(area(points, y(0)));
        parts.push(path(`line line-${index}`, points));
      }
      const value = shown?.values[index];
      if (value !== null && value !== undefined) {
        const at = { cx: this.#x(shown.time), cy: y(value), r: 3.5 };
        parts.push(drawing("circle", { class: `point line-${index}`, ...at }));
      }
    });
    if (this.#chosen) {
      const x = this.#x(this.#chosen.time);
      parts.push(line("cross", x, TOP, x, HEIGHT - BOTTOM));
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
  }

  #read(shown, newest) {
    this.values.forEach(({ value }, index) => {
      value.textContent = this.format(shown?.values[index] ?? null);
    });
    const age = this.#chosen ? Math.round(newest.time - shown.time) : 0;
    this.when.textContent = age > 0 ? ` ${age} s ago` : "";
    const readings = this.series.map(
      (each, index) => `${each.name} ${this.values[index].value.textContent}`,
    );
    const when = age > 0 ? `${age} seconds ago` : "now";
    const text = `${this.title}, ${when}: ${readings.join(", ")} ${this.unit}`;
    this.svg.setAttribute("aria-label", text);
  }
}

/** Runs of samples that are connected by a line. */
function runs(samples, index) {
  const found = [];
  let last = null;
  for (const sample of samples) {
    if (sample.values[index] === null) {
      last = null;
      continue;
    }
    if (last === null || sample.time - last.time > LONGEST_GAP) found.push([]);
    found.at(-1).push(sample);
    last = sample;
  }
  return found;
}

/** A tick distance of 1, 2 or 5 times a power of ten that results in two to four ticks. */
function niceStep(most) {
  const power = 10 ** Math.floor(Math.log10(most / 2));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => most / each <= 3);
}

function tickText(tick, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return tick >= 10000 ? `${tick / 1000}k` : tick.toFixed(digits);
}

function line(name, x1, y1, x2, y2) {
  return drawing("line", { class: name, x1, y1, x2, y2 });
}

function label(anchor, x, y, text) {
  return drawing("text", { class: "label", "text-anchor": anchor, x, y }, text);
}

function track(points) {
  return points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
}

// A stroke of length zero still has round ends, so a single sample is drawn as a dot.
function path(name, points) {
  return drawing("path", { class: name, d: `M${track(points)}${points.length > 1 ? "" : "h0"}` });
}

function area(points, floor) {
  const [first, last] = [points[0][0], points.at(-1)[0]].map((x) => x.toFixed(1));
  return drawing("path", { class: "area", d: `M${track(points)}L${last},${floor}L${first},${floor}Z` });
}
