// What a file is by its first bytes, and how an image, a clip, a sound or a document is shown and sent.

/** How much of a file tells whether it moves: the chunks about an animation come before its pixels. */
export const HEAD_BYTES = 4096;
const PDF = "application/pdf";

/** Return the media type and the kind, such as `image` or `document`, of a file that begins so; null for others. */
export function typeOf(head) {
  const text = String.fromCharCode(...head);
  if (text.startsWith("\x89PNG\r\n\x1a\n")) return { type: "image/png", kind: moves(text, "acTL") };
  if (text.startsWith("\xff\xd8\xff")) return { type: "image/jpeg", kind: "image" };
  if (text.startsWith("GIF8")) return { type: "image/gif", kind: "video" };
  if (text.startsWith("RIFF") && text.slice(8, 12) === "WEBP") return { type: "image/webp", kind: moves(text, "ANIM") };
  if (text.slice(4, 8) === "ftyp") return { type: "video/mp4", kind: "video" };
  if (text.startsWith("\x1aE\xdf\xa3")) return { type: "video/webm", kind: "video" };
  if (text.startsWith("%PDF-")) return { type: PDF, kind: "document" };
  const sound = soundTypeOf(head, text);
  return sound === null ? null : { type: sound, kind: "audio" };
}

function soundTypeOf(head, text) {
  if (text.startsWith("RIFF") && text.slice(8, 12) === "WAVE") return "audio/wav";
  if (text.startsWith("fLaC")) return "audio/flac";
  if (text.startsWith("OggS")) return "audio/ogg";
  // Layer III of MPEG audio, or a tag before it.
  return text.startsWith("ID3") || (head[0] === 0xff && (head[1] & 0xe6) === 0xe2) ? "audio/mpeg" : null;
}

const moves = (text, chunk) => (text.includes(chunk) ? "video" : "image");

/** Return the part of a message that names a file. */
export function partOf({ kind, name }, url) {
  if (kind === "document") return { type: "file", file: { file_data: url, filename: name } };
  if (kind === "audio") return { type: "audio_url", audio_url: { url } };
  return kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
}

/** Return an element that shows an image, plays a clip or a sound, or names a document. */
export function viewOf(url, name) {
  if (url.startsWith(`data:${PDF}`)) {
    return Object.assign(document.createElement("span"), { textContent: name || "PDF", className: "document" });
  }
  if (url.startsWith("data:audio/")) {
    const player = Object.assign(document.createElement("audio"), { src: url, controls: true });
    player.ariaLabel = name;
    return player;
  }
  if (!url.startsWith("data:video/")) return Object.assign(document.createElement("img"), { src: url, alt: name });
  const clip = document.createElement("video");
  Object.assign(clip, { src: url, muted: true, loop: true, autoplay: true, playsInline: true, controls: name !== "" });
  clip.ariaLabel = name;
  return clip;
}
