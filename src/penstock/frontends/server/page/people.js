// Who is where: each request gets a lane in the timeline, and keeps it for its life.

// Requests of the past whose lanes are remembered: more than a timeline can show.
const REMEMBERED = 2000;

export class People {
  constructor() {
    this.known = new Map(); // id -> lane
    this.lanes = []; // the id that holds a lane now, or null
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
        if (!live.has(id) && last.get(id) === step.index) this.lanes[this.known.get(id)] = null;
      }
    }
    for (const id of this.known.keys()) {
      if (this.known.size <= REMEMBERED) break;
      if (!this.lanes.includes(id)) this.known.delete(id);
    }
  }

  meet(id) {
    const lane = this.known.get(id);
    if (lane !== undefined && this.lanes[lane] === id) return;
    const free = this.lanes.findIndex((holder) => holder === null);
    this.known.set(id, free === -1 ? this.lanes.length : free);
    this.lanes[this.known.get(id)] = id;
  }
}
