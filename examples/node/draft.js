// Reads steps, one JSON object a line, and prints the draft for each:
//
//   node draft.js 127.0.0.1:50051 ../../proto < steps.jsonl
//
//   {"open": "chat-1", "prompt": [504, 2365]}
//   {"draft": "chat-1", "new_tokens": [282], "budget_nodes": 16}
//   {"close": "chat-1", "new_tokens": [260]}
//   {"context": [504, 2365, 282], "budget_nodes": 16}
import { createInterface } from 'node:readline';
import { join } from 'node:path';
import { DraftClient, RefusedError } from './draft_client.js';

const [address, protoDir] = process.argv.slice(2);
if (!address || !protoDir) {
  console.error('usage: node draft.js ADDRESS PROTO_DIRECTORY < steps.jsonl');
  process.exit(2);
}

async function answer(client, step) {
  if (step.open !== undefined) return client.open(step.open, step.prompt, step);
  if (step.close !== undefined) return client.close(step.close, step.new_tokens);
  if (step.context !== undefined) return client.draftContext(step.context, step.budget_nodes);
  return client.draft(step.draft, step.new_tokens, step.budget_nodes);
}

const client = new DraftClient(address, join(protoDir, 'retriever/v1/retriever.proto'), protoDir);
try {
  for await (const line of createInterface({ input: process.stdin })) {
    try {
      console.log(JSON.stringify((await answer(client, JSON.parse(line))) ?? {}));
    } catch (error) {
      if (!(error instanceof RefusedError)) throw error;
      console.log(JSON.stringify({ refused: error.code, message: error.message }));
    }
  }
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.shutDown();
}
