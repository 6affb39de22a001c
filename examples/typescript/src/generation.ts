/** What is asked for, what comes, and what of a streamed answer has come. */

import { HoldbackError } from "./errors";

export interface Message {
  role: string;
  content: string;
}

/** Exactly one of `prompt`, `messages` and `tokenIds`. What is not given has the default of the gateway. */
export interface GenerateOptions {
  prompt?: string;
  messages?: Message[];
  tokenIds?: number[];
  model?: string;
  requestId?: string;
  n?: number;
  stop?: string[];
  maxTokens?: number;
  temperature?: number;
  topP?: number;
  topK?: number;
  /** A 64-bit number, as text where it is beyond 2^53. */
  seed?: number | string;
  ignoreEos?: boolean;
}

/** New output of one choice; the texts of a choice concatenate to its text. */
export interface Piece {
  index: number;
  text: string;
  tokenIds: number[];
  /** On the last piece of each choice, for example `STOP` or `LENGTH`. */
  finishReason?: string;
  stopString?: string;
}

export interface Usage {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
}

/** A complete answer. */
export interface Generation {
  requestId: string;
  model: string;
  seed: string;
  choices: { index: number; text: string; tokenIds: number[]; finishReason: string }[];
  usage: Usage;
}

interface Started {
  requestId: string;
  model: string;
  seed: string;
  promptTokens: number;
}

/** One message of a stream; `event` names the field that is set. */
export interface StreamEvent {
  event: "started" | "delta" | "end" | "finished";
  started?: Started;
  delta?: { index: number; text: string; tokenIds: number[] };
  end?: { index: number; finishReason: string; stopReason?: { stopString?: string } | null };
  finished?: { usage: Usage };
}

/** The message `holdback.v1.Generation`. */
export interface GenerationRequest {
  requestId?: string;
  model?: string;
  text?: string;
  chat?: { messages: Message[] };
  tokenIds?: { tokenIds: number[] };
  n?: number;
  stop?: string[];
  sampling: { seed?: number | string; [field: string]: unknown };
  outputTokenIds: number[];
}

export function encode(options: GenerateOptions): GenerationRequest {
  const { prompt, messages, tokenIds, model, requestId, n, stop, ...sampling } = options;
  return {
    requestId,
    model,
    text: prompt,
    chat: messages && { messages },
    tokenIds: tokenIds && { tokenIds },
    n,
    stop,
    sampling,
    outputTokenIds: [],
  };
}

/** One streamed answer, over all the calls that it takes. */
export class Progress {
  /** Of the whole answer, once it is complete. */
  usage?: Usage;
  private started?: Started;
  private numOutputs = 0;
  private numEnded = 0;
  private readonly outputs: number[] = [];

  constructor(private readonly request: GenerationRequest) {}

  get numChoices(): number {
    return this.request.n ?? 1;
  }

  /** Every choice has its end; what may be missing is the usage. */
  get hasEnded(): boolean {
    return this.numEnded >= this.numChoices;
  }

  /** The usage of an answer that has ended, where the last message was lost; how much was cached is lost, too. */
  get usageSoFar(): Usage {
    return this.usage ?? { promptTokens: this.started?.promptTokens ?? 0, completionTokens: this.numOutputs, cachedTokens: 0 };
  }

  /** Notes one message; the piece that it brings, if it brings one. */
  take(event: StreamEvent): Piece | undefined {
    if (event.started) this.start(event.started);
    if (event.finished) this.usage = event.finished.usage;
    if (event.end) {
      this.numEnded += 1;
      const { index, finishReason, stopReason } = event.end;
      return { index, text: "", tokenIds: [], finishReason: shortName(finishReason), stopString: stopReason?.stopString };
    }
    if (!event.delta) return undefined;
    this.numOutputs += event.delta.tokenIds.length;
    if (this.numChoices === 1) this.outputs.push(...event.delta.tokenIds);
    return { index: event.delta.index, text: event.delta.text, tokenIds: event.delta.tokenIds };
  }

  /** The request for what has not come; before the first message that is the request itself. */
  rest(): GenerationRequest {
    if (this.started === undefined) return this.request;
    const { requestId, model, seed } = this.started;
    const sampling = { ...this.request.sampling, seed };
    return { ...this.request, requestId, model, sampling, outputTokenIds: this.outputs };
  }

  private start(started: Started): void {
    if (this.started !== undefined && this.started.promptTokens !== started.promptTokens) {
      throw new HoldbackError("the gateway that shall go on reads the prompt differently", "FAILED_PRECONDITION");
    }
    this.started = started;
  }
}

function shortName(finishReason: string): string {
  return finishReason.replace("FINISH_REASON_", "");
}
