/** Loads the protos at run time. `HOLDBACK_PROTOS` names their folder; else it is looked for upwards from here. */

import * as fs from "node:fs";
import * as path from "node:path";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import * as protobuf from "protobufjs";

const INFERENCE = path.join("holdback", "v1", "inference.proto");
const STATUS = path.join(__dirname, "..", "protos", "status.proto");

type ServiceConstructor = ReturnType<typeof grpc.makeGenericClientConstructor>;

/** The constructor of stubs of `holdback.v1.InferenceService`. Fields are in camelCase, enums are names. */
export function loadInferenceService(): ServiceConstructor {
  const options: loader.Options = { longs: String, enums: String, defaults: true, oneofs: true, includeDirs: [findProtos()] };
  const loaded = grpc.loadPackageDefinition(loader.loadSync(INFERENCE, options));
  const holdback = loaded["holdback"] as grpc.GrpcObject;
  return (holdback["v1"] as grpc.GrpcObject)["InferenceService"] as ServiceConstructor;
}

/** The messages of google.rpc, to read error details with. */
export const googleRpc = protobuf.loadSync(STATUS);

function findProtos(): string {
  const named = process.env["HOLDBACK_PROTOS"];
  if (named) return named;
  for (let folder = __dirname; ; folder = path.dirname(folder)) {
    const candidate = path.join(folder, "protos");
    if (fs.existsSync(path.join(candidate, INFERENCE))) return candidate;
    if (folder === path.dirname(folder)) throw new Error(`no protos/${INFERENCE} above ${__dirname}; set HOLDBACK_PROTOS`);
  }
}
