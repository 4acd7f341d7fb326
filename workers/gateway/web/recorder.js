// Records a question with the microphone, as a WAV file: what browsers record by themselves needs a decoder
// that not every renderer has.

const RATE = 16_000;

export class Recorder {
  /** `add` is called with each recording, `refuse` with a sentence about a microphone that gives nothing. */
  constructor(button, add, refuse) {
    this.button = button;
    this.add = add;
    this.refuse = refuse;
    this.count = 0;
    this.recorder = null;
    // Browsers give the microphone only to pages with TLS or of this machine.
    this.canRecord = Boolean(navigator.mediaDevices && globalThis.MediaRecorder);
    button.addEventListener("click", () => (this.recorder ? this.recorder.stop() : this.start()));
  }

  /** Show the button for a model that hears, if the browser gives the microphone. */
  show(hears) {
    this.button.hidden = !(hears && this.canRecord);
  }

  async start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      return this.refuse([`The microphone cannot be used: ${error.message}.`]);
    }
    const pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", ({ data }) => pieces.push(data));
    this.recorder.addEventListener("stop", () => {
      stream.getTracks().forEach((track) => track.stop());
      this.recorder = null;
      this.button.textContent = "Record";
      this.finish(new Blob(pieces));
    });
    this.recorder.start();
    this.button.textContent = "Stop recording";
  }

  async finish(recorded) {
    const context = new OfflineAudioContext(1, RATE, RATE);
    try {
      const sound = await context.decodeAudioData(await recorded.arrayBuffer());
      this.count += 1;
      this.add([new File([wavOf(sound.getChannelData(0))], `Recording ${this.count}.wav`)]);
    } catch {
      this.refuse(["The recording is empty."]);
    }
  }
}

/** Return the bytes of a WAV file of 16-bit samples. */
function wavOf(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, word) => [...word].forEach((char, i) => view.setUint8(at + i, char.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, 32_767 * Math.max(-1, Math.min(1, sample)), true));
  return view;
}
