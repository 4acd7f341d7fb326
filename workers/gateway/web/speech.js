// Plays the pieces of a speech as they arrive, one behind the other.

const RATE = 24_000;
// A piece that is late is played so much later, so that the next one may still be in time.
const LATE_S = 0.1;

export class Player {
  /** Made in the handler of a key or a click: otherwise browsers play nothing. */
  constructor() {
    this.context = new AudioContext({ sampleRate: RATE });
    this.endS = 0;
    this.seconds = 0;
  }

  /** Play 16-bit samples, in base64, behind those before. */
  add(data) {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const count = bytes.length >> 1;
    if (count === 0 || this.context.state === "closed") return;
    const buffer = this.context.createBuffer(1, count, RATE);
    const samples = buffer.getChannelData(0);
    for (let i = 0; i < count; i += 1) samples[i] = view.getInt16(2 * i, true) / 32_768;
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const nowS = this.context.currentTime;
    if (this.endS < nowS) this.endS = nowS + LATE_S;
    source.start(this.endS);
    this.endS += count / RATE;
    this.seconds += count / RATE;
  }

  /** Close the sound once all of it has been played. */
  finish() {
    setTimeout(() => this.stop(), 1000 * Math.max(0, this.endS - this.context.currentTime + LATE_S));
  }

  stop() {
    if (this.context.state !== "closed") this.context.close();
  }
}
