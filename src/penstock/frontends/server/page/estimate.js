// When something will be over. Each guess moves the estimate a part of the way, so that what is read does not jump.

const SHARE = 0.2;

export class Estimate {
  constructor() {
    this.end = null; // in seconds of the same clock as `now`
  }

  // The seconds left, where a guess at `now` says so many.
  left(guess, now) {
    this.end = this.end === null ? now + guess : this.end + SHARE * (now + guess - this.end);
    return Math.max(this.end - now, 0);
  }

  forget() {
    this.end = null;
  }
}
