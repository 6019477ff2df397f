/** Formatting of numbers. */

/** Placeholder for a missing number. */
export const NOTHING = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A number with a fixed number of decimal places. */
export function fixed(value, digits = 0) {
  if (!isNumber(value)) return NOTHING;
  return value.toLocaleString("en", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/** A number with about three significant digits. */
export function brief(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  return fixed(value, size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

/** A fraction as percentage. */
export function percent(value) {
  return isNumber(value) ? `${fixed(100 * value)} %` : NOTHING;
}

/** A duration, in milliseconds if it is shorter than a second. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  return seconds < 1 ? `${brief(1000 * seconds)} ms` : `${fixed(seconds, 2)} s`;
}

/** The uptime of a server in its two largest units. */
export function uptime(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours > 0) return `${hours} h ${minutes % 60} min`;
  return minutes > 0 ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

/** A count and its noun: "1 token", "2 tokens". */
export function count(number, noun) {
  return `${fixed(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A lenience, or a lenience by the number of waiting requests. */
export function lenience(value) {
  if (value === null || typeof value !== "object") return fixed(value, 2);
  return Object.entries(value)
    .sort(([one], [other]) => Number(one) - Number(other))
    .map(([start, each]) => (start === "0" ? fixed(each, 2) : `${fixed(each, 2)} from ${start}`))
    .join(", ");
}
