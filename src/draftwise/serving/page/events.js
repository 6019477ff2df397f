/** Server-sent events, read from the body of a response. */

// A carriage return at the end may be the first half of a line end.
const LINE_END = /\r\n|\n|\r(?!$)/;

/** The data of each event, as text. */
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
