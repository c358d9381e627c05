//! The one table of what is compiled: each unit is a kernel file with its constants, and has one or more functions.

use std::fmt;

/// A kernel file with the constants that it is compiled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The file's name without `.cu`.
    pub file: &'static str,
    /// `-DNAME=VALUE`, in the file's order.
    pub defines: Vec<(&'static str, u32)>,
}

impl fmt::Display for Unit {
    /// `file__NAMEvalue_NAMEvalue`: also the name of its cubin.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file)?;
        for (i, (name, value)) in self.defines.iter().enumerate() {
            write!(f, "{}{}{value}", if i == 0 { "__" } else { "_" }, name.trim_start_matches("LL_"))?;
        }
        Ok(())
    }
}

/// A kernel: an `extern "C"` function of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Function {
    /// What it is compiled in.
    pub unit: Unit,
    /// Its name in the text.
    pub name: &'static str,
}
