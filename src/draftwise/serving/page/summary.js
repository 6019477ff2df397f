/** Summary of a request. */

import { element } from "./dom.js";
import { NOTHING, brief, count, duration, fixed, percent } from "./format.js";

const ENDINGS = {
  stop: "ended by the model",
  length: "stopped at max tokens",
  cancelled: "cancelled",
  stopped: "stopped by you",
  error: "ended by an error",
};

/** Times of the first and last token, in seconds from the start of the request. */
export class Timing {
  #start = performance.now();
  first = null;
  last = null;

  mark() {
    this.last = (performance.now() - this.#start) / 1000;
    this.first ??= this.last;
  }
}

/** The list of figures below an answer. */
export class Summary {
  #list;

  constructor(list) {
    this.#list = list;
  }

  clear() {
    this.#list.replaceChildren();
    this.#list.hidden = true;
  }

  /** `usage` is null if the request ended before the server sent it. */
  show({ numTokens, usage, ending, timing }) {
    const speculation = usage?.speculation;
    const tokens = usage?.completion_tokens ?? numTokens;
    const rows = [
      ["tokens", "Tokens", fixed(tokens), this.#ending(usage, ending), false],
      [
        "accepted",
        "Mean accepted length",
        fixed(speculation?.mean_accepted_length, 2),
        speculation
          ? `tokens per step, ${count(speculation.num_steps, "step")}`
          : "tokens per step",
        true,
      ],
      [
        "rate",
        "Acceptance rate",
        percent(speculation?.acceptance_rate),
        speculation
          ? `${fixed(speculation.num_accepted)} of ${fixed(speculation.num_verified)} verified`
          : "of the verified tokens",
        true,
      ],
      ["first", "First token after", duration(timing.first), "from sending", false],
      ["speed", "Speed", brief(tokens / timing.last), "tokens/s, from sending", false],
      ["lossless", "Lossless", ...lossless(speculation?.lossless), true],
    ];
    this.#list.replaceChildren(
      ...rows.map(([key, name, value, note, speculative]) =>
        element(
          "div",
          { "data-figure": key, class: speculative ? "speculative" : false },
          element("dt", {}, name),
          element("dd", { class: "value" }, value),
          element("dd", { class: "note" }, note),
        ),
      ),
    );
    this.#list.hidden = false;
  }

  #ending(usage, ending) {
    const text = ENDINGS[ending] ?? ending ?? "ended";
    return usage ? `${text}; prompt ${fixed(usage.prompt_tokens)}` : text;
  }
}

function lossless(value) {
  if (value === true) return ["Yes", "exactly the target’s distribution"];
  if (value === false) return ["No", "not the target’s distribution"];
  return [NOTHING, "not reported by the server"];
}
