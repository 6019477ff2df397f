/** Sliders that show the server’s value until they are given one of their own. */

/** A slider with its value in words, and a button back to the server’s value. */
export class FollowingSlider {
  #slider;
  #shown;
  #back;
  #write;
  #served = null;

  /** `write` puts a value, the slider's or the server’s, into words. */
  constructor(field, write) {
    this.#slider = field.control;
    this.#shown = field.box.querySelector("[data-part=shown]");
    this.#back = field.box.querySelector("button");
    this.#write = write;
    /** The value chosen here; null while the server’s holds. */
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

  /** Take the server’s value; `at` is where the slider stands for it. */
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
    const whose = this.own === null ? "the server’s" : "own value";
    this.#slider.setAttribute("aria-valuetext", `${text}, ${whose}`);
    this.#back.hidden = this.own === null;
  }
}
