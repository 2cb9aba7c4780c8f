// Who is who: each request gets a lane in the timeline and a tone, and keeps both for its life.

const TONES = 4;
// Requests of the past whose tones are remembered: more than a timeline can show.
const REMEMBERED = 2000;

export class People {
  constructor() {
    this.known = new Map(); // id -> {lane, tone}
    this.lanes = []; // the id that holds a lane now, or null
    this.nextTone = 0;
  }

  // `steps` are new ones in order; `live` the ids that have not ended. A lane is free again after its request's last step.
  follow(steps, live) {
    const last = new Map();
    for (const step of steps) for (const span of step.spans) last.set(span.request_id, step.index);
    this.lanes.forEach((id, lane) => {
      if (id !== null && !live.has(id) && !last.has(id)) this.lanes[lane] = null;
    });
    for (const step of steps) {
      for (const span of step.spans) this.meet(span.request_id);
      for (const span of step.spans) {
        const id = span.request_id;
        if (!live.has(id) && last.get(id) === step.index) this.lanes[this.known.get(id).lane] = null;
      }
    }
    for (const id of this.known.keys()) {
      if (this.known.size <= REMEMBERED) break;
      if (!this.lanes.includes(id)) this.known.delete(id);
    }
  }

  meet(id) {
    const one = this.known.get(id) ?? { tone: this.nextTone++ % TONES, lane: null };
    this.known.set(id, one);
    if (one.lane === null || this.lanes[one.lane] !== id) {
      const free = this.lanes.findIndex((holder) => holder === null);
      one.lane = free === -1 ? this.lanes.length : free;
      this.lanes[one.lane] = id;
    }
    return one;
  }

  tone(id) {
    const one = this.known.get(id);
    if (one) return one.tone;
    this.known.set(id, { tone: this.nextTone++ % TONES, lane: null });
    return this.known.get(id).tone;
  }
}
