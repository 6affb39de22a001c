/**
 * A client of one gateway, or of several that serve the same.
 *
 * What it does beyond the calls themselves: a stream that breaks goes on at the last token that came, and a call that no
 * gateway has taken up is made again. Both are a matter of a few lines, see `stream`.
 */

import { setTimeout as sleep } from "node:timers/promises";
import * as grpc from "@grpc/grpc-js";
import { HoldbackError } from "./errors";
import { loadInferenceService } from "./protos";
import { Generation, GenerateOptions, Progress, Piece, StreamEvent, Usage, encode } from "./generation";

const FIRST_WAIT_MS = 100;
const MAX_WAIT_MS = 2000;

export interface ClientSettings {
  /** Sent with every call. */
  apiKey?: string;
  /** Authorities of the gateways' certificates, PEM. Without them there is no TLS. */
  tlsCa?: Buffer;
  /** How often in a row a call is tried again, and how often a stream goes on in all. */
  maxRetries?: number;
  maxResumes?: number;
}

export interface CallOptions {
  /** After which the call is given up, at the scheduler too; all tries together. */
  timeoutMs?: number;
  /** Ends the call, at the gateway too. */
  signal?: AbortSignal;
}

/** An answer while it comes. Leaving the loop ends the request at the gateway. */
export interface AnswerStream extends AsyncGenerator<Piece, Usage> {}

const InferenceService = loadInferenceService();

export class HoldbackClient {
  private readonly stubs: grpc.Client[];
  private readonly metadata = new grpc.Metadata();
  private readonly maxRetries: number;
  private readonly maxResumes: number;
  private turn = 0;

  /** @param addresses `host:port`, or `dns:///name:port` for all addresses of a name. */
  constructor(addresses: string | string[], settings: ClientSettings = {}) {
    const credentials = settings.tlsCa ? grpc.credentials.createSsl(settings.tlsCa) : grpc.credentials.createInsecure();
    this.stubs = [addresses].flat().map((address) => new InferenceService(address, credentials, channelOptions(address)));
    if (settings.apiKey !== undefined) this.metadata.set("authorization", `Bearer ${settings.apiKey}`);
    this.maxRetries = settings.maxRetries ?? 4;
    this.maxResumes = settings.maxResumes ?? 8;
  }

  close(): void {
    for (const stub of this.stubs) stub.close();
  }

  /**
   * Yields an answer piece by piece and returns the usage. Throws HoldbackError.
   *
   * When the stream breaks, the request is sent again with the seed of its first message and the tokens that came, to the
   * next gateway; that one sends only what follows.
   */
  async *stream(options: GenerateOptions, call: CallOptions = {}): AnswerStream {
    const deadline = call.timeoutMs === undefined ? undefined : new Date(Date.now() + call.timeoutMs);
    const progress = new Progress(encode(options));
    for (let failures = 0, resumes = 0; ; ) {
      let hasCome = false;
      try {
        for await (const event of this.events(progress.rest(), deadline, call.signal)) {
          hasCome = true;
          failures = 0;
          const piece = progress.take(event);
          if (piece !== undefined) yield piece;
        }
        if (progress.usage === undefined) throw new HoldbackError("the stream ended without saying that it is complete", "INTERNAL");
        return progress.usage;
      } catch (error) {
        if (!(error instanceof HoldbackError) || call.signal?.aborted) throw error;
        if (error.wasLost && progress.hasEnded) return progress.usageSoFar;
        const isRefused = !hasCome && error.wasNotTaken;
        const canResume = error.wasLost && progress.numChoices === 1 && resumes < this.maxResumes;
        if (!isRefused && !canResume) throw error;
        if (!isRefused) resumes += 1;
        await this.wait(error, failures++, deadline, call.signal);
      }
    }
  }

  /** The complete answer. It is not made a second time when the first call may have begun. */
  async generate(options: GenerateOptions, call: CallOptions = {}): Promise<Generation> {
    const deadline = call.timeoutMs === undefined ? undefined : new Date(Date.now() + call.timeoutMs);
    for (let failures = 0; ; ) {
      try {
        return await this.unary<Generation>("generate", { generation: encode(options) }, deadline, call.signal);
      } catch (error) {
        if (!(error instanceof HoldbackError) || !error.wasNotTaken) throw error;
        await this.wait(error, failures++, deadline, call.signal);
      }
    }
  }

  /** The names of the models that are served. */
  async models(call: CallOptions = {}): Promise<string[]> {
    const deadline = call.timeoutMs === undefined ? undefined : new Date(Date.now() + call.timeoutMs);
    const response = await this.unary<{ models: { name: string }[] }>("listModels", {}, deadline, call.signal);
    return response.models.map((model) => model.name);
  }

  private async *events(generation: object, deadline?: Date, signal?: AbortSignal): AsyncGenerator<StreamEvent> {
    const stub = this.nextStub() as any;
    const call: grpc.ClientReadableStream<StreamEvent> = stub.generateStream({ generation }, this.metadata, { deadline });
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel);
    try {
      signal?.throwIfAborted();
      yield* call as AsyncIterable<StreamEvent>;
    } catch (error) {
      throw signal?.aborted ? signal.reason : asHoldbackError(error);
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.on("error", () => undefined); // cancelling is reported as one
      call.cancel();
    }
  }

  private unary<Response>(method: string, request: object, deadline?: Date, signal?: AbortSignal): Promise<Response> {
    return new Promise((resolve, reject) => {
      const stub = this.nextStub() as any;
      const call: grpc.ClientUnaryCall = stub[method](request, this.metadata, { deadline }, done);
      const cancel = () => call.cancel();
      function done(error: grpc.ServiceError | null, response: Response): void {
        signal?.removeEventListener("abort", cancel);
        if (error === null) resolve(response);
        else reject(signal?.aborted ? signal.reason : asHoldbackError(error));
      }
      if (signal?.aborted) cancel();
      else signal?.addEventListener("abort", cancel);
    });
  }

  private nextStub(): grpc.Client {
    const stub = this.stubs[this.turn % this.stubs.length];
    if (stub === undefined) throw new HoldbackError("addresses is empty; allowed: at least one", "INVALID_ARGUMENT");
    this.turn += 1;
    return stub;
  }

  /** Waits before the next try; throws the error when there is none, or no time for one. */
  private async wait(error: HoldbackError, failures: number, deadline?: Date, signal?: AbortSignal): Promise<void> {
    const backoff = Math.min(FIRST_WAIT_MS * 2 ** failures, MAX_WAIT_MS) * (0.5 + Math.random() / 2);
    const waitMs = error.retryAfterMs ?? backoff;
    const isTooLate = deadline !== undefined && Date.now() + waitMs >= deadline.getTime();
    if (failures >= this.maxRetries || isTooLate) throw error;
    await sleep(waitMs, undefined, { signal });
  }
}

function channelOptions(address: string): grpc.ChannelOptions {
  const options: grpc.ChannelOptions = {
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.enable_http_proxy": 0,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 2000,
  };
  if (address.startsWith("dns:")) {
    options["grpc.service_config"] = JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] });
  }
  return options;
}

function asHoldbackError(error: unknown): unknown {
  return error instanceof Error && "code" in error && "metadata" in error ? HoldbackError.of(error as grpc.ServiceError) : error;
}
