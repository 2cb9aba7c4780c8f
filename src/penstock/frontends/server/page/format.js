// Numbers and times as people read them.

const grouped = new Intl.NumberFormat("en");

export const count = (number) => grouped.format(number);

export function rate(perSecond) {
  return perSecond > 0 && perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

export function duration(seconds) {
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  return longDuration(Math.round(seconds));
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < units.length - 1 && number / 1024 ** power >= 1023.5) power += 1;
  const value = number / 1024 ** power;
  return `${power && value < 9.95 ? value.toFixed(1) : count(Math.round(value))} ${units[power]}`;
}

// Whole seconds: for times that count up or down under the reader's eyes.
export function longDuration(seconds) {
  const whole = Math.round(seconds);
  const pad = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${pad(Math.floor(whole / 60) % 60)} min`;
  return `${Math.floor(whole / 86400)} d ${pad(Math.floor(whole / 3600) % 24)} h`;
}

export function about(seconds) {
  return seconds < 9.95 ? `${seconds.toFixed(1)} s` : longDuration(seconds);
}

export function percent(part, whole) {
  return whole > 0 ? Math.min(100, (part / whole) * 100) : 0;
}

// Long ids differ at their end.
export const shortId = (id) => (id.length > 10 ? id.slice(-6) : id);

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
