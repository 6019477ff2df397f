/** Parser of server-sent events. */

// A carriage return at the end may be followed by a line feed in the next chunk.
const LINE_END = /\r\n|\n|\r(?!$)/;

/** Yield the data of each event in the body of a response as text. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (done ? "\n" : value)).split(LINE_END);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
