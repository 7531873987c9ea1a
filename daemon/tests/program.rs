//! What kind of program the daemon is, before it runs.

#![allow(clippy::unwrap_used)]

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, elf};

// The build's wrapper (`.cargo/rustc`) not called, or without effect. Expect: no loader is asked for, and addresses are still chosen by the kernel.
#[test]
fn the_daemon_needs_no_loader_and_can_be_anywhere() {
    let file = std::fs::read(env!("CARGO_BIN_EXE_portoland")).unwrap();
    let file = ElfFile64::<Endianness>::parse(&*file).unwrap();
    let endian = file.endian();
    let types = file.elf_program_headers().iter().map(|h| h.p_type(endian));
    assert!(types.into_iter().all(|kind| kind != elf::PT_INTERP));
    assert_eq!(file.elf_header().e_type.get(endian), elf::ET_DYN);
}
