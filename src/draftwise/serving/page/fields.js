/** Form fields with error messages. */

import { element } from "./dom.js";

const CONTROLS = "textarea, select, input:not([type=radio], [readonly])";

/** A field of a form with one or more controls and an error message. */
export class Field {
  #error;
  #refused = null;
  #about = null;

  constructor(box) {
    this.box = box;
    const id = `${this.control.id}-error`;
    this.#error = element("p", { class: "error", id, hidden: true });
    box.append(this.#error);
    box.addEventListener("input", () => this.clear());
  }

  /** The first visible control. */
  get control() {
    const controls = [...this.box.querySelectorAll(CONTROLS)];
    return controls.find((each) => !each.closest("[hidden]")) ?? controls[0];
  }

  /** Show an error next to the control, and describe the control with it for screen readers. */
  refuse(message) {
    this.clear();
    const folded = this.box.closest("details");
    if (folded) folded.open = true;
    this.#error.textContent = message;
    this.#error.hidden = false;
    this.#refused = this.control;
    this.#about = this.#refused.getAttribute("aria-describedby");
    const described = [this.#about, this.#error.id].filter(Boolean).join(" ");
    this.#refused.setAttribute("aria-describedby", described);
    this.#refused.setAttribute("aria-invalid", "true");
  }

  clear() {
    if (this.#refused === null) return;
    this.#error.hidden = true;
    this.#error.textContent = "";
    this.#refused.removeAttribute("aria-invalid");
    if (this.#about === null) this.#refused.removeAttribute("aria-describedby");
    else this.#refused.setAttribute("aria-describedby", this.#about);
    this.#refused = null;
  }
}

/** The fields of a form by their names in the API. */
export class Fields {
  #fields = new Map();

  constructor(form) {
    for (const box of form.querySelectorAll("[data-field]")) {
      this.#fields.set(box.dataset.field, new Field(box));
    }
  }

  get(name) {
    return this.#fields.get(name);
  }

  clear() {
    for (const field of this.#fields.values()) field.clear();
  }

  /** Show an error at the field it names ("speculation.policy" is "policy"); false if none. */
  refuse(param, message) {
    const named = (param ?? "").split(".").find((part) => this.#fields.has(part));
    const field = this.#fields.get(named);
    if (!field || field.box.closest("[hidden]")) return false;
    // The message is shown next to the field, so the name is redundant.
    const name = `${param}: `;
    field.refuse(message.startsWith(name) ? message.slice(name.length) : message);
    field.control.focus();
    return true;
  }
}
