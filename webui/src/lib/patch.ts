// Brings the content of a node to that of another one and keeps every node that stays the same, so that selection,
// focus and scroll positions survive.

/** Decides about an element that the page fills itself: true means that its content is left to the page. */
export type Leaf = (have: HTMLElement, wanted: HTMLElement) => boolean;

/** Makes the children of `parent` equal to those of `wanted`, which is used up. The first `kept` are left alone. */
export function patchChildren(parent: Node, wanted: Node, kept = 0, leaf: Leaf = () => false): void {
  let have: ChildNode | null = parent.childNodes[kept] ?? null;
  for (let next = wanted.firstChild; next !== null; next = wanted.firstChild) {
    if (have !== null && have.nodeName === next.nodeName) {
      patch(have, next, leaf);
      next.remove();
      have = have.nextSibling;
    } else {
      parent.insertBefore(next, have);
      if (have === null) continue;
      const after: ChildNode | null = have.nextSibling;
      have.remove();
      have = after;
    }
  }
  while (have !== null) {
    const after: ChildNode | null = have.nextSibling;
    have.remove();
    have = after;
  }
}

function patch(have: Node, wanted: Node, leaf: Leaf): void {
  if (have instanceof Text) setText(have, wanted.nodeValue ?? "");
  if (!(have instanceof Element) || !(wanted instanceof Element)) return;
  copyAttributes(have, wanted);
  if (have instanceof HTMLElement && wanted instanceof HTMLElement && leaf(have, wanted)) return;
  patchChildren(have, wanted, 0, leaf);
}

/** A text that grows is appended to: a selection in it stays. */
function setText(node: Text, text: string): void {
  if (node.data === text) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function copyAttributes(have: Element, wanted: Element): void {
  for (const { name, value } of wanted.attributes) {
    if (have.getAttribute(name) !== value) have.setAttribute(name, value);
  }
  for (const name of have.getAttributeNames()) {
    if (!wanted.hasAttribute(name)) have.removeAttribute(name);
  }
}
