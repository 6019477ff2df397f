/** The panel for the speculation settings of the server. */

import { element } from "./dom.js";
import { Fields } from "./fields.js";
import { FollowingSlider } from "./following.js";
import { count, lenience } from "./format.js";
import { about } from "./policies.js";
import { LenienceSetting } from "./rule.js";

/** Shows the server’s settings, and sends changes when they are applied. */
export class OperatorPanel {
  #form;
  #fields;
  #client;
  #gamma;
  #lenience;
  #served = null;
  #changedPolicy = false;

  /** `applied` is called with the server’s new settings, `failed` with errors of requests. */
  constructor(form, client, { applied, failed }) {
    this.#form = form;
    this.#client = client;
    this.#fields = new Fields(form);
    this.#gamma = new FollowingSlider(this.#fields.get("num_speculative_tokens"), (value) =>
      count(value, "token"),
    );
    this.#lenience = new LenienceSetting(this.#fields.get("lenience"));
    form.elements.policy.addEventListener("change", () => {
      this.#changedPolicy = form.elements.policy.value !== this.#served?.policy;
    });
    for (const kind of ["input", "change"]) {
      form.addEventListener(kind, () => {
        this.#say("");
        this.#update();
      });
    }
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      if (this.#served) this.#discard();
      this.#say("");
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (!this.#served) return;
      try {
        const speculation = await this.#apply();
        if (speculation) applied(speculation);
      } catch (error) {
        this.#refuse(error);
        failed(error);
      }
    });
  }

  /** Show the server’s settings, and keep changes that are not applied yet. */
  show(speculation) {
    const { policy, policies } = speculation;
    this.#served = speculation;
    if (!speculation.enabled) return;
    const select = this.#form.elements.policy;
    if (select.options.length === 0) {
      select.replaceChildren(
        ...policies.map(({ name, usable }) =>
          element("option", { value: name, disabled: !usable }, usable ? name : `${name} (n/a)`),
        ),
      );
    }
    if (!this.#changedPolicy) select.value = policy;
    this.#changedPolicy = select.value !== policy;
    this.#gamma.limit(speculation.max_num_speculative_tokens);
    this.#gamma.follow(speculation.num_speculative_tokens);
    this.#lenience.follow(speculation.lenience);
    this.#update();
  }

  #changes() {
    const changes = {};
    if (this.#changedPolicy) changes.policy = this.#form.elements.policy.value;
    const gamma = this.#gamma.own;
    if (gamma !== null && gamma !== this.#served.num_speculative_tokens) {
      changes.num_speculative_tokens = gamma;
    }
    if (this.#lenience.changed) changes.lenience = this.#lenience.value;
    return changes;
  }

  async #apply() {
    this.#fields.clear();
    const changes = this.#changes();
    if (Object.keys(changes).length === 0) {
      this.#say("Nothing to apply: the server already has these settings.");
      return null;
    }
    this.#say("Applying…");
    const speculation = await this.#client.changeSpeculation(changes);
    this.#served = speculation;
    this.#discard();
    this.#say(`Applied: ${inWords(speculation)}.`);
    return speculation;
  }

  #discard() {
    this.#fields.clear();
    this.#changedPolicy = false;
    this.#gamma.reset();
    this.#lenience.reset();
    this.show(this.#served);
  }

  #refuse(error) {
    const placed = this.#fields.refuse(error.param, error.message);
    this.#say(placed ? "Not applied." : `Not applied: ${error.message}`, true);
  }

  #update() {
    if (!this.#served?.enabled) return;
    const chosen = this.#form.elements.policy.value;
    this.#form.querySelector("#server-policy-about").textContent = about(
      this.#served.policies,
      chosen,
    );
    const changed = Object.keys(this.#changes()).length > 0;
    this.#form.classList.toggle("changed", changed);
    this.#form.querySelector("[type=reset]").disabled = !changed;
  }

  #say(message, wrong = false) {
    const status = this.#form.querySelector("[role=status]");
    status.textContent = message;
    status.classList.toggle("wrong", wrong);
  }
}

function inWords({ policy, num_speculative_tokens: gamma, lenience: value }) {
  return `${policy}, at most ${count(gamma, "token")}, lenience ${lenience(value)}`;
}
