/** Sliders that show the server’s value until the user changes them. */

/** A slider with its value as text, and a button that restores the server’s value. */
export class FollowingSlider {
  #slider;
  #shown;
  #back;
  #write;
  #served = null;

  /** `write` converts a value of the slider or the server to text. */
  constructor(field, write) {
    this.#slider = field.control;
    this.#shown = field.box.querySelector("[data-part=shown]");
    this.#back = field.box.querySelector("button");
    this.#write = write;
    /** The value chosen by the user; null to use the server’s value. */
    this.own = null;
    this.#slider.addEventListener("input", () => {
      this.own = this.#slider.valueAsNumber;
      this.#show();
    });
    this.#back.addEventListener("click", () => {
      field.clear();
      this.reset();
      this.#slider.dispatchEvent(new Event("change", { bubbles: true }));
      this.#slider.focus();
    });
  }

  /** Set the server’s value; `at` is the corresponding position of the slider. */
  follow(served, at = served) {
    this.#served = served;
    if (this.own === null) this.#slider.valueAsNumber = at;
    this.at = at;
    this.#show();
  }

  limit(most) {
    this.#slider.max = most;
    if (this.own !== null && this.own > most) this.own = most;
  }

  reset() {
    this.own = null;
    this.#slider.valueAsNumber = this.at;
    this.#show();
  }

  #show() {
    const text = this.#write(this.own ?? this.#served);
    this.#shown.textContent = text;
    const source = this.own === null ? "the server’s" : "own value";
    this.#slider.setAttribute("aria-valuetext", `${text}, ${source}`);
    this.#back.hidden = this.own === null;
  }
}
