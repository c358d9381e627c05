//! The Python door: convert, release the GIL, call once, convert.
