/** What the server tells of its policies. */

/** What a policy does, and whether it keeps the promise. */
export function about(policies, name) {
  const policy = policies.find((each) => each.name === name);
  if (!policy) return "";
  const caution = policy.lossless ? "" : "; not lossless when sampling";
  return `${policy.description}${caution}.`;
}
