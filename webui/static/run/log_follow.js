// @ts-check
// Keeps a log scrolled to its end while lines are added, unless the user has scrolled away from the end.
import { chip, setPressed } from "../dom.js";

const END_DISTANCE = 40; // px from the end that still count as the end

/**
 * The button Follow. `beforeEnd` is called when it is pressed, before the end is shown.
 * @param {HTMLElement} box what scrolls @param {() => void} beforeEnd
 */
export function createFollow(box, beforeEnd) {
  let following = true;
  let previous = { top: 0, inner: 0, outer: 0 };
  const button = chip("Follow", goToEnd, { "aria-pressed": "true" });

  /** @param {boolean} value */
  function set(value) {
    following = value;
    setPressed(button, value);
  }
  /** Show the end again after a change of lines or layout. */
  function settle() {
    if (following) box.scrollTop = box.scrollHeight;
  }
  function goToEnd() {
    set(true);
    beforeEnd();
    settle();
  }
  /** Only the user leaves the end: a scroll event that comes with another height comes from the layout. */
  function scrolled() {
    const now = { top: box.scrollTop, inner: box.scrollHeight, outer: box.clientHeight };
    const sameHeight = now.inner === previous.inner && now.outer === previous.outer;
    if (now.inner - now.top - now.outer <= END_DISTANCE) set(true);
    else if (sameHeight && now.top < previous.top) set(false);
    else settle();
    previous = now;
  }
  box.addEventListener("scroll", scrolled);
  new ResizeObserver(settle).observe(box);
  return { button, set, settle, isFollowing: () => following };
}
