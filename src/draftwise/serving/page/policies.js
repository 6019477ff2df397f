/** Descriptions of policies. */

/** The description of a policy, with a warning if it is not lossless. */
export function about(policies, name) {
  const policy = policies.find((each) => each.name === name);
  if (!policy) return "";
  const caution = policy.lossless ? "" : "; not lossless when sampling";
  return `${policy.description}${caution}.`;
}
