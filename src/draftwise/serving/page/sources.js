/** The sources of tokens, and the legend that counts them. */

import { element } from "./dom.js";
import { fixed } from "./format.js";

/** Name and meaning of each source, in the order of the legend. */
export const SOURCES = new Map([
  ["draft", ["accepted", "drafted by a model and accepted by the target"]],
  ["copy", ["copied", "copied from an earlier text and accepted by the target"]],
  ["correction", ["correction", "sampled by the target in place of a rejected token"]],
  ["bonus", ["bonus", "sampled by the target after a fully accepted draft"]],
  ["target", ["target", "sampled by the target in a step without a draft"]],
]);

/** One button per source with its number of tokens; pressing it highlights the tokens. */
export class Legend {
  #counts = new Map();
  #buttons = new Map();
  #shown = new Map();

  /** `single` is called with the source to highlight, or with null for all sources. */
  constructor(list, single) {
    for (const [source, [name, meaning]] of SOURCES) {
      const number = element("span", { class: "count" }, "0");
      const button = element(
        "button",
        { type: "button", "aria-pressed": "false", "data-source": source, title: meaning },
        element("span", { class: "sample", "data-source": source, "aria-hidden": "true" }, "ab"),
        element("span", { class: "name" }, name),
        number,
      );
      const row = element("li", {}, button, element("span", { class: "meaning" }, meaning));
      button.addEventListener("click", () => {
        const pressed = button.getAttribute("aria-pressed") === "false";
        for (const each of this.#buttons.values()) each.setAttribute("aria-pressed", "false");
        button.setAttribute("aria-pressed", String(pressed));
        single(pressed ? source : null);
      });
      this.#buttons.set(source, button);
      this.#shown.set(source, number);
      list.append(row);
    }
    this.reset();
  }

  reset() {
    for (const source of SOURCES.keys()) this.#put(source, 0);
  }

  add(source) {
    if (this.#counts.has(source)) this.#put(source, this.#counts.get(source) + 1);
  }

  /** Number of tokens since the last reset. */
  get total() {
    return [...this.#counts.values()].reduce((sum, each) => sum + each, 0);
  }

  #put(source, number) {
    this.#counts.set(source, number);
    this.#shown.get(source).textContent = fixed(number);
  }
}
