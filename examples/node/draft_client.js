// A client of the draft service, made from its .proto when it starts: nothing generated is kept.
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const LOADING = { keepCase: true, longs: Number, enums: String, defaults: true };
const NO_TREE = { token_ids: [], parents: [], probabilities: [], sources: [] };

/** Says which session was refused and why; the code is gRPC's. */
export class RefusedError extends Error {
  constructor({ session_id: session, code, message }) {
    super(`${session || 'the message'} was refused (${grpc.status[code] ?? code}): ${message}`);
    this.code = code;
  }
}

/**
 * Sessions over one DraftStream. A step sends only the tokens committed since the last one; a
 * session begins in the message of its first step. The sessions of a stream end with it.
 */
export class DraftClient {
  #client;
  #stream;
  #number = 0;
  #waiting = new Map(); // number of a message -> what to do with its response
  #sessions = new Map(); // name -> { length, opening }
  #failure = null;

  constructor(address, protoPath, includeDir) {
    const definition = protoLoader.loadSync(protoPath, { ...LOADING, includeDirs: [includeDir] });
    const { RetrieverService } = grpc.loadPackageDefinition(definition).retriever.v1;
    this.#client = new RetrieverService(address, grpc.credentials.createInsecure());
    this.#stream = this.#client.DraftStream();
    this.#stream.on('data', (response) => this.#take(response));
    this.#stream.on('error', (error) => this.#fail(error));
    this.#stream.on('end', () => this.#fail(new Error('the service ended the stream')));
  }

  /** Begins a sequence; the service learns of it with its first step. */
  open(session, prompt, { fingerprint = '', forget = false } = {}) {
    const opening = { session_id: session, prompt, vocabulary_fingerprint: fingerprint, forget };
    this.#sessions.set(session, { length: prompt.length, opening });
  }

  /**
   * Commits new tokens and resolves to a tree: parallel lists, best nodes first, -1 for children
   * of the last token. Rejects with a RefusedError; nothing of that step was noted then.
   */
  async draft(session, newTokens, budgetNodes = 32) {
    const known = this.#sessions.get(session);
    const length = known.length + newTokens.length;
    const step = {
      session_id: session,
      new_token_ids: newTokens,
      length,
      budget_nodes: budgetNodes,
    };
    const openings = known.opening ? [known.opening] : [];
    const response = await this.#send({ openings, steps: [step] });
    this.#sessions.set(session, { length, opening: null });
    return response.trees[0] ?? NO_TREE;
  }

  /** Ends a sequence; what it generated joins the recent generations. */
  async close(session, newTokens = []) {
    const { opening } = this.#sessions.get(session);
    this.#sessions.delete(session);
    if (opening === null) {
      await this.#send({ closings: [{ session_id: session, new_token_ids: newTokens }] });
    }
  }

  /** Resolves to a tree for a bare context, without a session. */
  draftContext(context, budgetNodes = 32) {
    return new Promise((resolve, reject) => {
      const request = { context, budget_nodes: budgetNodes };
      this.#client.Draft(request, (error, response) =>
        error ? reject(error) : resolve(response.tree ?? NO_TREE),
      );
    });
  }

  /** Disconnects, which ends the sessions that are open. */
  shutDown() {
    this.#failure ??= new Error('this client was shut down');
    this.#stream.end();
    this.#client.close();
  }

  #send(message) {
    return new Promise((resolve, reject) => {
      if (this.#failure) {
        reject(this.#failure);
        return;
      }
      this.#number += 1;
      this.#waiting.set(this.#number, { resolve, reject });
      this.#stream.write({ ...message, sequence_number: this.#number });
    });
  }

  #take(response) {
    const waiting = this.#waiting.get(response.sequence_number);
    this.#waiting.delete(response.sequence_number);
    // That a deadline has passed is no refusal: all was noted, and only trees are missing.
    const refusal = response.statuses.find(({ code }) => code !== grpc.status.DEADLINE_EXCEEDED);
    if (refusal) {
      waiting?.reject(new RefusedError(refusal));
    } else {
      waiting?.resolve(response);
    }
  }

  #fail(error) {
    this.#failure ??= error;
    for (const { reject } of this.#waiting.values()) reject(this.#failure);
    this.#waiting.clear();
  }
}
