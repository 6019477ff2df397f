/** What one request came to. */

import { element } from "./dom.js";
import { NOTHING, brief, count, duration, fixed, percent } from "./format.js";

const ENDINGS = {
  stop: "ended by itself",
  length: "cut at max tokens",
  cancelled: "cancelled",
  stopped: "stopped by you",
  error: "ended by an error",
};

/** Times a request as its tokens come, in seconds from its start. */
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

  /** `usage` is null where the server did not come to send it. */
  show({ numTokens, usage, ending, timing }) {
    const speculation = usage?.speculation;
    const tokens = usage?.completion_tokens ?? numTokens;
    const rows = [
      ["tokens", "Tokens", fixed(tokens), this.#told(usage, ending), false],
      [
        "accepted",
        "Mean accepted length",
        fixed(speculation?.mean_accepted_length, 2),
        speculation ? `tokens a step, ${count(speculation.num_steps, "step")}` : "tokens a step",
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

  #told(usage, ending) {
    const told = ENDINGS[ending] ?? ending ?? "ended";
    return usage ? `${told}; prompt ${fixed(usage.prompt_tokens)}` : told;
  }
}

function lossless(value) {
  if (value === true) return ["Yes", "exactly the target’s distribution"];
  if (value === false) return ["No", "not the target’s distribution"];
  return [NOTHING, "the server did not say"];
}
