//! Peers: what people use today, as they run it, on the same wire and cores as Portolan.
//!
//! Each is a [`Subject`]. Those whose library can be linked into this program have actors of it; the others are programs that measure
//! themselves ([`crate::subjects::commands`]).

use crate::subjects::Subject;

/// All peers, installed or not.
pub fn all() -> Vec<Box<dyn Subject>> {
    Vec::new()
}
