/** Control for a lenience, or for a lenience by the number of waiting requests. */

import { element } from "./dom.js";
import { FollowingSlider } from "./following.js";
import { lenience } from "./format.js";

/** The lenience that applies while no request waits. */
export function startOf(value) {
  return typeof value === "object" ? value["0"] : value;
}

/** One slider, or one row per number of waiting requests from which another value applies. */
export class LenienceSetting {
  #served = 1;
  #slider;
  #choice;
  #rows;
  #one;
  #many;

  constructor(field) {
    this.#one = field.box.querySelector("[data-part=one]");
    this.#many = field.box.querySelector("[data-part=rule]");
    this.#rows = this.#many.querySelector("ol");
    this.#choice = field.box.querySelector("[data-part=choice]");
    const slider = { box: this.#one, control: this.#one.querySelector("input"), clear() {} };
    this.#slider = new FollowingSlider(slider, lenience);
    this.#choice.addEventListener("change", () => this.#choose());
    this.#many.querySelector("[data-part=add]").addEventListener("click", () => {
      const last = this.#rows.lastElementChild?.querySelector("input").valueAsNumber ?? 0;
      const row = this.#row(last + 8, 0.9);
      this.#rows.append(row);
      row.querySelector("input").focus();
      this.#changed();
    });
  }

  /** Set the server’s value, and keep changes of the user. */
  follow(served) {
    if (!this.changed) this.#put(served);
    this.#served = served;
    this.#slider.follow(typeof served === "object" ? startOf(served) : served);
  }

  get changed() {
    return JSON.stringify(this.value) !== JSON.stringify(this.#served);
  }

  /** A number, or a mapping that contains NaN for rows without a value. */
  get value() {
    if (!this.#byLoad) return this.#slider.own ?? startOf(this.#served);
    const rule = {};
    for (const row of this.#rows.children) {
      const [start, each] = row.querySelectorAll("input");
      rule[start.value] = each.valueAsNumber;
    }
    return rule;
  }

  reset() {
    this.#slider.reset();
    this.#put(this.#served);
  }

  get #byLoad() {
    return this.#choice.querySelector("input:checked").value === "rule";
  }

  #put(value) {
    const byLoad = typeof value === "object";
    this.#choice.querySelector(`input[value=${byLoad ? "rule" : "one"}]`).checked = true;
    const rule = byLoad ? value : { 0: value };
    this.#rows.replaceChildren(
      ...Object.entries(rule).map(([start, each]) => this.#row(Number(start), each)),
    );
    this.#show();
  }

  #choose() {
    this.#show();
    this.#changed();
  }

  #show() {
    this.#one.hidden = this.#byLoad;
    this.#many.hidden = !this.#byLoad;
  }

  #row(start, value) {
    const first = start === 0;
    const from = { type: "number", min: 0, step: 1, "aria-label": "Minimum waiting requests" };
    const number = element("input", { ...from, value: start, readonly: first });
    const limits = { type: "number", min: 0.01, max: 1, step: 0.01, "aria-label": "Lenience" };
    const row = element(
      "li",
      {},
      element("span", {}, "from"),
      number,
      element("span", {}, "waiting"),
      element("input", { ...limits, value }),
    );
    if (!first) {
      const label = "Remove this step";
      const remove = element("button", { type: "button", class: "icon", "aria-label": label }, "×");
      remove.addEventListener("click", () => {
        row.remove();
        this.#many.querySelector("[data-part=add]").focus();
        this.#changed();
      });
      row.append(remove);
    }
    return row;
  }

  #changed() {
    this.#rows.dispatchEvent(new Event("input", { bubbles: true }));
  }
}
