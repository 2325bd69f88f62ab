// @ts-check
// The bar above the charts of a view: smoothing, scale and zoom. This browser remembers the first two.
import { chip, el, toggleChip } from "./dom.js";

/** @typedef {{ weight: number, logScale: boolean, zoom: [number, number] | null }} Settings */

/** @returns {Settings} */
export const loadSettings = () => ({
  weight: Number(localStorage.getItem("fp-smooth") ?? "0.6"),
  logScale: localStorage.getItem("fp-log") === "yes",
  zoom: null, // a part of the x axis, for all charts
});

/**
 * @param {string} title @param {any[]} middle what comes after the title @param {Settings} settings that it changes
 * @param {{ draw: () => void, rebuild: () => void, resetZoom: () => void }} charts
 */
export function createChartBar(title, middle, settings, { draw, rebuild, resetZoom }) {
  const smoothing = el("output.fp-figures", {}, settings.weight.toFixed(2));
  const range = { type: "range", min: 0, max: 0.99, step: 0.01, value: settings.weight };
  const slider = el("input", { ...range, "aria-label": "Smoothing", oninput: smooth });
  const log = toggleChip("Log scale", settings.logScale, setLogScale);
  const reset = chip("Reset zoom", resetZoom);
  const controls = [el("span.fp-gap"), el("label", {}, "Smoothing", slider, smoothing), log, reset];
  const node = el("div.fp-charts-bar", {}, el("h3", {}, title), middle, controls);

  function smooth() {
    settings.weight = Number(slider.value);
    smoothing.textContent = settings.weight.toFixed(2);
    localStorage.setItem("fp-smooth", slider.value);
    draw();
  }
  /** @param {boolean} pressed */
  function setLogScale(pressed) {
    settings.logScale = pressed;
    localStorage.setItem("fp-log", pressed ? "yes" : "no");
    rebuild();
  }
  return { node, reset };
}
