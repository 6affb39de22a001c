/** Failed calls as exceptions: the status code, and what the gateway says in its details. */

import * as grpc from "@grpc/grpc-js";
import type { Long } from "protobufjs";
import { googleRpc } from "./protos";

const DETAILS_KEY = "grpc-status-details-bin";
const ERROR_INFO = googleRpc.lookupType("google.rpc.ErrorInfo");
const RETRY_INFO = googleRpc.lookupType("google.rpc.RetryInfo");
const STATUS = googleRpc.lookupType("google.rpc.Status");

interface ErrorInfo {
  reason: string;
  metadata: Record<string, string>;
}

export class HoldbackError extends Error {
  constructor(
    message: string,
    /** Of gRPC, as `INVALID_ARGUMENT`. */
    readonly code: string,
    /** Stable, for programs, as `INVALID_FIELD`; empty when the error does not come from a gateway. */
    readonly reason: string = "",
    /** Of a wrong field: its path, what was sent, what is allowed. Empty for other errors. */
    readonly field: string = "",
    readonly value: string = "",
    readonly limit: string = "",
    /** When to try again; undefined when trying again does not help. */
    readonly retryAfterMs?: number,
  ) {
    super(message);
    this.name = "HoldbackError";
  }

  /** Reads the status of a call. */
  static of(failure: grpc.ServiceError): HoldbackError {
    const code = grpc.status[failure.code] ?? String(failure.code);
    const details = failure.metadata?.get(DETAILS_KEY)[0];
    if (!(details instanceof Buffer)) return new HoldbackError(failure.details || failure.message, code);
    const { info, retryAfterMs } = readDetails(details);
    const { field = "", value = "", limit = "" } = info.metadata;
    return new HoldbackError(failure.details, code, info.reason, field, value, limit, retryAfterMs);
  }

  /** No gateway took the call up, or the one that did holds nothing of it any more: it may be made again. */
  get wasNotTaken(): boolean {
    if (this.retryAfterMs !== undefined || this.reason === "SHUTTING_DOWN") return true;
    return this.code === "UNAVAILABLE" && !this.reason && /^(No connection established|Name resolution failed)/.test(this.message);
  }

  /** The connection or the gateway went away under the call. */
  get wasLost(): boolean {
    return this.reason === "SHUTTING_DOWN" || (!this.reason && ["UNAVAILABLE", "CANCELLED"].includes(this.code));
  }
}

function readDetails(bytes: Buffer): { info: ErrorInfo; retryAfterMs?: number } {
  let info: ErrorInfo = { reason: "", metadata: {} };
  let retryAfterMs: number | undefined;
  const status = STATUS.decode(bytes) as unknown as { details: { type_url: string; value: Uint8Array }[] };
  for (const detail of status.details) {
    if (detail.type_url.endsWith("/google.rpc.ErrorInfo")) {
      info = ERROR_INFO.toObject(ERROR_INFO.decode(detail.value), { defaults: true }) as ErrorInfo;
    } else if (detail.type_url.endsWith("/google.rpc.RetryInfo")) {
      const { retryDelay } = RETRY_INFO.decode(detail.value) as unknown as { retryDelay?: { seconds: Long | number; nanos: number } };
      retryAfterMs = Number(retryDelay?.seconds ?? 0) * 1000 + (retryDelay?.nanos ?? 0) / 1e6;
    }
  }
  return { info, retryAfterMs };
}
