/** Statistics of the server, polled every second. */

import { Chart } from "./chart.js";
import { element } from "./dom.js";
import { brief, fixed, percent, uptime } from "./format.js";

const INTERVAL = 1000; // milliseconds
// Maximum wait after repeated failures, in milliseconds.
const LONGEST_WAIT = 10000;
// Maximum number of positions that are labelled with numbers.
const MAX_LABELLED = 10;
const PARTS = ["draft", "companion", "select", "verify", "accept", "rest"];

/** Charts of the statistics, time per step by phase, and acceptance by position. */
export class Monitor {
  #charts;
  #split;
  #positions;
  #prefixes;
  #guard;
  #uptime;
  #timer = null;
  #failures = 0;
  #isPolling = false;

  /**
   * `answered` is called with all statistics, and `failed` with every error; false stops polling.
   * A hidden page requests nothing.
   */
  constructor(panel, client, { answered, failed }) {
    this.client = client;
    this.answered = answered;
    this.failed = failed;
    this.#charts = charts();
    panel.querySelector("[data-part=charts]").append(...this.#charts.map((each) => each.element));
    this.#split = panel.querySelector("[data-part=split]");
    this.#positions = panel.querySelector("[data-part=positions]");
    this.#prefixes = panel.querySelector("[data-part=prefixes]");
    this.#guard = panel.querySelector("[data-part=guard]");
    this.#uptime = panel.querySelector("[data-part=uptime]");
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.#timer !== null) this.start();
    });
  }

  /** Start polling. */
  start() {
    clearTimeout(this.#timer);
    this.#poll();
  }

  async #poll() {
    if (this.#isPolling) return;
    this.#isPolling = true;
    let continues = true;
    try {
      if (!document.hidden) {
        const stats = await this.client.stats();
        this.#show(stats);
        this.answered(stats);
      }
      this.#failures = 0;
    } catch (error) {
      this.#failures += 1;
      continues = this.failed(error);
    } finally {
      this.#isPolling = false;
    }
    const wait = Math.min(LONGEST_WAIT, INTERVAL * 2 ** this.#failures);
    const next = this.#failures ? wait : INTERVAL;
    this.#timer = continues ? setTimeout(() => this.#poll(), next) : null;
  }

  #show(stats) {
    const time = performance.now() / 1000;
    for (const chart of this.#charts) chart.add(time, stats);
    this.#uptime.textContent = `up ${uptime(stats.uptime_seconds)}`;
    this.#showSplit(stats.time_split ?? {});
    this.#showPositions(stats.acceptance_by_position ?? []);
    const hitRate = stats.prefix_cache_hit_rate ?? null;
    this.#prefixes.hidden = hitRate === null;
    this.#prefixes.querySelector("b").textContent = percent(hitRate);
    const balance = stats.guard_balance ?? null;
    this.#guard.hidden = balance === null;
    this.#guard.querySelector("b").textContent = fixed(Math.max(0, balance ?? 0), 1);
  }

  #showSplit(split) {
    const whole = PARTS.reduce((sum, part) => sum + (split[part] ?? 0), 0);
    this.#split.hidden = !(whole > 0);
    if (this.#split.hidden) return;
    const [bar, list] = this.#split.querySelectorAll("[data-part=bar], ul");
    const shares = PARTS.map((part) => [part, (split[part] ?? 0) / whole]).filter(
      ([, share]) => share > 0,
    );
    bar.replaceChildren(
      ...shares.map(([part, share]) => {
        const piece = element("span", { "data-time": part });
        piece.style.flexGrow = share;
        return piece;
      }),
    );
    list.replaceChildren(
      ...shares.map(([part, share]) =>
        element(
          "li",
          {},
          element("span", { class: "swatch", "data-time": part }),
          element("span", {}, part),
          element("b", {}, percent(share)),
        ),
      ),
    );
  }

  #showPositions(rates) {
    this.#positions.hidden = rates.every((rate) => rate === null);
    if (this.#positions.hidden) return;
    this.#positions.classList.toggle("many", rates.length > MAX_LABELLED);
    this.#positions.querySelector("ol").replaceChildren(
      ...rates.map((rate) => {
        const column = element("span", { class: "column" });
        column.style.height = percent(rate ?? 0).replace(" ", "");
        return element(
          "li",
          {},
          element("b", {}, fixed(100 * (rate ?? NaN))),
          element("span", { class: "well" }, column),
        );
      }),
    );
  }
}

function charts() {
  const goodput = new Chart({
    title: "Goodput",
    unit: "tokens/s",
    least: 1,
    format: brief,
    series: [{ name: "goodput", value: (stats) => stats.goodput }],
  });
  const accepted = new Chart({
    title: "Mean accepted length",
    unit: "tokens/step",
    least: 2,
    format: (value) => fixed(value, 2),
    series: [{ name: "mean accepted length", value: (stats) => stats.mean_accepted_length }],
  });
  const step = new Chart({
    title: "Step time",
    unit: "ms",
    least: 1,
    format: brief,
    series: [{ name: "step time", value: (stats) => milliseconds(stats.step_seconds) }],
  });
  const requests = new Chart({
    title: "Requests",
    unit: "",
    least: 2,
    format: (value) => fixed(value),
    series: [
      { name: "running", value: (stats) => stats.num_running },
      { name: "waiting", value: (stats) => stats.num_waiting },
    ],
  });
  accepted.element.classList.add("speculative");
  return [goodput, accepted, step, requests];
}

function milliseconds(seconds) {
  return Number.isFinite(seconds) ? 1000 * seconds : null;
}
