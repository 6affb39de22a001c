/** `npm start -- "What is the capital of France?"`: streams an answer. Ctrl-C ends it, at the gateway too. */

import { HoldbackClient } from "./client";
import { HoldbackError } from "./errors";

async function main(): Promise<void> {
  const question = process.argv.slice(2).join(" ") || "What is the capital of France?";
  const addresses = (process.env["HOLDBACK_ADDRESS"] ?? "127.0.0.1:50051").split(",");
  const client = new HoldbackClient(addresses, { apiKey: process.env["HOLDBACK_API_KEY"] });
  const stop = new AbortController();
  process.once("SIGINT", () => stop.abort());
  try {
    for await (const piece of client.stream({ messages: [{ role: "user", content: question }] }, { signal: stop.signal })) {
      process.stdout.write(piece.text);
    }
  } catch (error) {
    if (!stop.signal.aborted) console.error(error instanceof HoldbackError ? `${error.code}: ${error.message}` : error);
    process.exitCode = stop.signal.aborted ? 130 : 1;
  } finally {
    process.stdout.write("\n");
    client.close();
  }
}

void main();
