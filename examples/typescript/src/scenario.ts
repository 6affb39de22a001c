/**
 * For the tests: makes one stream and writes what comes as lines of JSON.
 *
 *     node dist/scenario.js '{"addresses": ["127.0.0.1:50051"], "options": {...}, "timeoutMs": 1000, "leaveAfter": 2}'
 *
 * Each piece is `{"piece": ...}`. The last line is `{"usage": ...}`, `{"error": ...}`, or `{"left": true}` when the loop
 * was left after so many pieces.
 */

import { GenerateOptions } from "./generation";
import { HoldbackClient } from "./client";
import { HoldbackError } from "./errors";

interface Scenario {
  addresses: string[];
  apiKey?: string;
  options: GenerateOptions;
  timeoutMs?: number;
  leaveAfter?: number;
  maxRetries?: number;
}

function tell(line: object): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

async function run(scenario: Scenario): Promise<void> {
  const client = new HoldbackClient(scenario.addresses, { apiKey: scenario.apiKey, maxRetries: scenario.maxRetries });
  const stream = client.stream(scenario.options, { timeoutMs: scenario.timeoutMs });
  try {
    for (let numPieces = 0; ; numPieces++) {
      if (numPieces === scenario.leaveAfter) {
        await stream.return({ promptTokens: 0, completionTokens: 0, cachedTokens: 0 });
        return tell({ left: true });
      }
      const next = await stream.next();
      if (next.done) return tell({ usage: next.value });
      tell({ piece: next.value });
    }
  } catch (error) {
    if (!(error instanceof HoldbackError)) throw error;
    const { code, reason, field, value, limit, retryAfterMs } = error;
    tell({ error: { code, reason, field, value, limit, retryAfterMs: retryAfterMs ?? null } });
  } finally {
    client.close();
  }
}

void run(JSON.parse(process.argv[2] ?? "{}") as Scenario);
