// The browser's own dialog that picks files. Its field is never part of the page, where a screen reader would find it.

let field: HTMLInputElement | null = null; // kept: the browser may collect a field while its dialog is open

/** Lets the user pick files; `take` is not called if none is picked. */
export function pickFiles(take: (files: File[]) => void): void {
  field = document.createElement("input");
  field.type = "file";
  field.multiple = true;
  field.onchange = () => take([...(field?.files ?? [])]);
  field.click();
}
