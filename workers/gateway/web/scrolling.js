// Keeps the newest text in view while an answer arrives, unless the reader has scrolled up.

const NEAR_PX = 48;

/** Follows the end of `content` in the scrolling element `box`; `button` leads back there. */
export class Follower {
  constructor(box, content, button) {
    this.box = box;
    this.button = button;
    this.top = 0;
    this.isFollowing = true;
    box.addEventListener("scroll", () => this.onScroll(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => (this.isFollowing ? this.toEnd() : this.draw()));
    observer.observe(content);
    observer.observe(box);
  }

  toEnd() {
    this.isFollowing = true;
    this.box.scrollTop = this.box.scrollHeight;
    this.top = this.box.scrollTop;
    this.draw();
  }

  /** Text that arrives moves the end away; only a movement upwards is the reader's. */
  onScroll() {
    const { scrollTop } = this.box;
    if (this.rest < NEAR_PX) this.isFollowing = true;
    else if (scrollTop < this.top) this.isFollowing = false;
    this.top = scrollTop;
    this.draw();
  }

  get rest() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight;
  }

  draw() {
    this.button.hidden = this.isFollowing || this.rest < NEAR_PX;
  }
}
