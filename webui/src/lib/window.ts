// Which rows of a long list are mounted. Heights are measured once a row has been seen and estimated before.

export interface Range {
  /** Rows [start, end) are mounted. */
  start: number;
  end: number;
  /** Height of the rows before and after them, in pixels. */
  before: number;
  after: number;
}

/** The rows that a viewport shows, and `overscan` pixels on both sides. */
export function visibleRange(
  n: number,
  heightOf: (index: number) => number,
  view: { top: number; height: number; overscan: number },
): Range {
  const from = view.top - view.overscan;
  const to = view.top + view.height + view.overscan;
  const range = { start: n, end: n, before: 0, after: 0 };
  let top = 0;
  for (let i = 0; i < n; i++) {
    const bottom = top + heightOf(i);
    if (bottom <= from) {
      range.before = bottom;
    } else if (top < to) {
      range.start = Math.min(range.start, i);
    } else {
      range.start = Math.min(range.start, i);
      range.end = Math.min(range.end, i);
    }
    top = bottom;
  }
  range.after = top - offsetOf(range.end, heightOf);
  return range;
}

/** A place in a list: so many pixels below the top of a row. */
export interface Place {
  key: string;
  offsetPx: number;
}

/** The row at a height, and how far below the row's top that is, in pixels; the last row if the list ends above. */
export function rowAt(
  n: number,
  heightOf: (index: number) => number,
  at: number,
): { index: number; offsetPx: number } {
  let top = 0;
  let index = 0;
  while (index < n - 1 && top + heightOf(index) <= at) top += heightOf(index++);
  return { index, offsetPx: at - top };
}

/** The top of a row, in pixels. */
export function offsetOf(index: number, heightOf: (index: number) => number): number {
  let top = 0;
  for (let i = 0; i < index; i++) top += heightOf(i);
  return top;
}
