// A conversation is a tree of messages: an edit or another answer begins a further branch.

/** The messages from the first one to the leaf that is shown. */
export function branch(conversation) {
  const known = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  let id = conversation.leaf;
  while (id && known.has(id)) {
    found.unshift(known.get(id));
    id = known.get(id).parent;
  }
  return found;
}

/** The messages that stand in the same place, in the order in which they were made. */
export function siblings(conversation, message) {
  return conversation.messages.filter((other) => (other.parent ?? null) === (message.parent ?? null));
}

/** The newest leaf below a message, which is what going to another branch shows. */
export function leafBelow(conversation, message) {
  let found = message;
  for (;;) {
    const next = conversation.messages.filter((other) => other.parent === found.id).at(-1);
    if (!next) return found.id;
    found = next;
  }
}
