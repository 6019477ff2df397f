/** Table of past answers, for comparing settings. */

import { element } from "./dom.js";
import { NOTHING, brief, fixed, percent } from "./format.js";

const MAX_ROWS = 8;

/** A table with the newest answer first, shown from the second answer on. */
export class PastAnswers {
  #section;
  #rows;

  constructor(section) {
    this.#section = section;
    this.#rows = section.querySelector("tbody");
  }

  /** Add a completed request. */
  add({ words, usage, timing }) {
    const { completion_tokens: tokens, speculation } = usage;
    const { lossless } = speculation ?? {};
    this.#rows.prepend(
      element(
        "tr",
        {},
        element("td", {}, words),
        element("td", { class: "roomy" }, fixed(tokens)),
        element("td", { class: "speculative" }, fixed(speculation?.mean_accepted_length, 2)),
        element("td", { class: "speculative roomy" }, percent(speculation?.acceptance_rate)),
        element("td", {}, brief(tokens / timing.last)),
        element("td", { class: "speculative roomy" }, { true: "yes", false: "no" }[lossless] ?? NOTHING),
      ),
    );
    while (this.#rows.children.length > MAX_ROWS) this.#rows.lastElementChild.remove();
    this.#section.hidden = this.#rows.children.length < 2;
  }
}
