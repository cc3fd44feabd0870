/** Figures in readable form. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes, in binary units. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "";
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(rest) >= 100 ? 0 : Math.abs(rest) >= 10 ? 1 : 2;
  return `${rest.toFixed(digits)} ${UNITS[unit]}`;
}

/** Seconds as "42 s", "3 min 5 s", "2 h 10 min". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 0.0995 && seconds > 0) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A measured number with four significant digits. */
export function number(value, digits = 4) {
  if (typeof value === "string" && value !== "") return value; // "nan", "inf"
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString();
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e9) return Math.round(value).toLocaleString();
  return size !== 0 && (size < 1e-3 || size >= 1e9)
    ? value.toExponential(digits - 1)
    : Number(value.toPrecision(digits)).toString();
}

/** A fraction as a percentage. */
export function percent(value) {
  return Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : "";
}

/** A time, in seconds since the epoch, in the reader's locale. */
export function moment(seconds) {
  if (!seconds) return "";
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** A setting's value on one line. */
export function setting(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.map(setting).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** `{method: {rank: 4}}` as `{"method.rank": 4}`. */
export function flatten(values, prefix = "") {
  const flat = {};
  for (const [key, value] of Object.entries(values ?? {})) {
    if (value !== null && typeof value === "object" && !Array.isArray(value))
      Object.assign(flat, flatten(value, `${prefix}${key}.`));
    else flat[prefix + key] = value;
  }
  return flat;
}

/** A job's name, or its number without one. */
export function jobName(job) {
  return job.name || `Job ${job.number}`;
}
