/** The form for a request. */

import { element } from "./dom.js";
import { Fields } from "./fields.js";
import { FollowingSlider } from "./following.js";
import { count, lenience } from "./format.js";
import { about } from "./policies.js";
import { startOf } from "./rule.js";

const POLICY_OFF = "off";
const NUMBERS = ["temperature", "max_tokens", "seed"];
const WHOLE = new Set(["max_tokens", "seed"]);

/** Converts the form to the body of a request. */
export class Composer {
  #form;
  #fields;
  #gamma;
  #lenience;
  #served = null;
  #words;

  constructor(form) {
    this.#form = form;
    this.#fields = new Fields(form);
    this.#words = form.querySelector("[data-part=words]");
    this.#gamma = new FollowingSlider(this.#fields.get("num_speculative_tokens"), (value) =>
      count(value, "token"),
    );
    this.#lenience = new FollowingSlider(this.#fields.get("lenience"), lenience);
    const note = form.querySelector("#own-lossy");
    this.#fields.get("lenience").box.addEventListener("input", () => this.#warn(note));
    this.#fields.get("lenience").box.addEventListener("change", () => this.#warn(note));
    form.addEventListener("change", (event) => {
      if (event.target.name === "mode") this.#label();
      if (event.target.name === "policy") this.#explain();
      this.#summarise();
    });
    form.addEventListener("input", () => this.#summarise());
    this.#label();
  }

  /** "text" or "chat". */
  get mode() {
    return this.#form.elements.mode.value;
  }

  get prompt() {
    return this.#form.elements.prompt.value;
  }

  set prompt(text) {
    this.#form.elements.prompt.value = text;
  }

  /** Show the served models; the select is hidden if there is only one. Without a chat template, texts
   * are continued. */
  showModels(models) {
    const select = this.#form.elements.model;
    select.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    select.closest("[data-field]").hidden = models.length < 2;
    if (models.some((model) => model.has_chat_template)) return;
    const [chat, text] = this.#form.elements.mode;
    chat.disabled = true;
    chat.parentElement.title = "The model has no chat template.";
    text.checked = true;
    this.#label();
  }

  /** Show the server’s settings in fields that the user has not changed. */
  showSpeculation(speculation) {
    this.#served = speculation;
    if (!speculation.enabled) {
      this.#summarise();
      return;
    }
    this.#gamma.limit(speculation.num_speculative_tokens);
    this.#gamma.follow(speculation.num_speculative_tokens);
    this.#lenience.follow(speculation.lenience, startOf(speculation.lenience));
    this.#showPolicies(speculation);
    this.#explain();
    this.#summarise();
  }

  /** The body of a request without its messages or prompt; null if a field is invalid. */
  read() {
    this.#fields.clear();
    if (this.prompt.trim() === "") {
      this.#fields.get("prompt").refuse("Write a prompt first.");
      this.#form.elements.prompt.focus();
      return null;
    }
    const body = { model: this.#form.elements.model.value };
    for (const name of NUMBERS) {
      const value = this.#number(name);
      if (value === false) return null;
      if (value !== null) body[name] = value;
    }
    if (this.#served?.enabled) {
      const speculation = this.#speculation();
      if (Object.keys(speculation).length > 0) body.speculation = speculation;
    }
    return body;
  }

  /** Text that summarises the settings of a body returned by `read`. */
  inWords({ speculation = {}, temperature }) {
    const parts = [];
    const { policy, num_speculative_tokens: gamma, lenience: served } = this.#served ?? {};
    if (!this.#served?.enabled || speculation.enabled === false) {
      parts.push("target alone");
    } else {
      parts.push(
        speculation.policy ?? policy,
        `γ ${speculation.num_speculative_tokens ?? gamma}`,
        `lenience ${lenience(speculation.lenience ?? served)}`,
      );
    }
    if (temperature !== undefined) parts.push(`temperature ${temperature}`);
    return parts.join(", ");
  }

  /** Show an error at the field it names; false if there is no such field. */
  refuse(param, message) {
    return this.#fields.refuse(param === "messages" ? "prompt" : param, message);
  }

  /** The number in a field; null if the field is empty, false if it is not a number. */
  #number(name) {
    const { control } = this.#fields.get(name);
    const text = control.value.trim();
    const value = Number(text);
    if (text === "" && !control.validity.badInput) return null;
    const fits = WHOLE.has(name) ? Number.isSafeInteger(value) : Number.isFinite(value);
    if (text !== "" && fits) return value;
    this.#fields.refuse(name, `Must be a ${WHOLE.has(name) ? "whole " : ""}number.`);
    return false;
  }

  #speculation() {
    const policy = this.#form.elements.policy.value;
    if (policy === POLICY_OFF) return { enabled: false };
    const own = {};
    if (policy !== "") own.policy = policy;
    if (this.#gamma.own !== null) own.num_speculative_tokens = this.#gamma.own;
    if (this.#lenience.own !== null) own.lenience = this.#lenience.own;
    return own;
  }

  #showPolicies({ policy, policies }) {
    const select = this.#form.elements.policy;
    const chosen = select.value;
    const options = [
      element("option", { value: "" }, `the server’s (${policy})`),
      element("option", { value: POLICY_OFF }, "off: target-only decoding"),
      ...policies
        .filter(({ name, usable }) => usable && name !== "none")
        .map(({ name, description }) =>
          element("option", { value: name, title: description }, name),
        ),
    ];
    // Replacing the options, even by equal ones, would close an open list.
    if (options.map(key).join() === [...select.options].map(key).join()) return;
    select.replaceChildren(...options);
    select.value = chosen;
    if (select.selectedIndex < 0) select.value = "";
  }

  #explain() {
    const { policy, policies } = this.#served;
    const { value } = this.#form.elements.policy;
    this.#form.querySelector("#own-policy-about").textContent =
      value === POLICY_OFF ? "no tokens are drafted." : about(policies, value || policy);
  }

  #warn(note) {
    note.hidden = !(this.#lenience.own !== null && this.#lenience.own < 1);
  }

  /** Show the settings where they are folded away. */
  #summarise() {
    if (this.#served === null) return;
    const { temperature, max_tokens: most } = this.#form.elements;
    const settings = { temperature: temperature.value || undefined };
    if (this.#served.enabled) settings.speculation = this.#speculation();
    const limit = most.value === "" ? "" : `, at most ${count(Number(most.value), "token")}`;
    this.#words.textContent = this.inWords(settings) + limit;
  }

  #label() {
    const chat = this.mode === "chat";
    this.#form.querySelector("label[for=prompt]").textContent = chat ? "Message" : "Prompt";
    this.#form.elements.prompt.placeholder = chat
      ? "Ask something. Earlier messages are included."
      : "The model continues this text.";
  }
}

function key(option) {
  return `${option.value}=${option.textContent}`;
}
