//! The machine code of a running process: where its functions are, and changing a byte of it.
//!
//! The mapping is private and read-only; a write through `/proc/PID/mem` breaks the sharing first, as a debugger's would. So the
//! changed page is this process's alone: not the file's, not the standby's.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

/// A function of a program, in its file's own addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// As the linker has it.
    pub name: String,
    pub address: u64,
    pub bytes: u64,
}

/// A program's file.
pub struct Program {
    pub functions: Vec<Function>,
    entry: u64,
    /// The lowest address it wants to be loaded at, and its pages.
    base: u64,
}

impl Program {
    /// Reads the symbol table.
    pub fn read(path: &Path) -> Result<Self> {
        let data = fs::read(path).with_context(|| path.display().to_string())?;
        let file = object::File::parse(&*data).with_context(|| path.display().to_string())?;
        let base = file.segments().map(|s| s.address()).min().unwrap_or(0);
        let symbols = file.symbols().filter(|symbol| {
            symbol.kind() == SymbolKind::Text && symbol.is_definition() && symbol.size() > 0
        });
        let mut functions: Vec<Function> = symbols
            .filter_map(|symbol| {
                Some(Function {
                    name: symbol.name().ok()?.to_owned(),
                    address: symbol.address(),
                    bytes: symbol.size(),
                })
            })
            .collect();
        functions.sort_by_key(|function| function.address);
        functions.dedup_by_key(|function| function.address);
        Ok(Self {
            functions,
            entry: file.entry(),
            base: base & !0xfff,
        })
    }

    /// One that has these functions and is nowhere.
    #[cfg(test)]
    pub fn with_functions(functions: Vec<Function>) -> Self {
        Self {
            functions,
            entry: 0,
            base: 0,
        }
    }
}

/// A process's machine code.
pub struct Text {
    pid: i32,
    memory: File,
    /// From an address in the file to one in the process.
    shift: u64,
    entry: u64,
}

impl Text {
    /// Of a process whose program lies where it did when it was started.
    pub fn of(pid: i32) -> Result<Self> {
        let exe = PathBuf::from(format!("/proc/{pid}/exe"));
        let data = fs::read(&exe).with_context(|| exe.display().to_string())?;
        let file = object::File::parse(&*data).context("a program")?;
        let base = file.segments().map(|s| s.address()).min().unwrap_or(0) & !0xfff;
        Self::at(pid, base, file.entry())
    }

    /// Of a process that runs this program.
    pub fn of_program(pid: i32, program: &Program) -> Result<Self> {
        Self::at(pid, program.base, program.entry)
    }

    fn at(pid: i32, base: u64, entry: u64) -> Result<Self> {
        let link = fs::read_link(format!("/proc/{pid}/exe")).context("its program")?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).context("its mappings")?;
        let start = load_address(&maps, &link.to_string_lossy())?;
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .context("its memory")?;
        let shift = start.wrapping_sub(base);
        Ok(Self {
            pid,
            memory,
            shift,
            entry: entry.wrapping_add(shift),
        })
    }

    /// Where the program was entered when it began.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Where an address of the file is in the process.
    pub fn address(&self, in_file: u64) -> u64 {
        in_file.wrapping_add(self.shift)
    }

    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let what = || format!("reading process {} at {address:#x}", self.pid);
        self.memory.read_exact_at(bytes, address).with_context(what)
    }

    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let what = || format!("writing process {} at {address:#x}", self.pid);
        self.memory.write_all_at(bytes, address).with_context(what)
    }

    /// Flips one bit. Returns the byte as it was.
    pub fn flip(&self, address: u64, bit: u32) -> Result<u8> {
        let mut byte = [0];
        self.read(address, &mut byte)?;
        self.write(address, &[byte[0] ^ 1 << bit])?;
        Ok(byte[0])
    }
}

/// Where the first page of the program's file is mapped.
fn load_address(maps: &str, program: &str) -> Result<u64> {
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(_), Some(offset)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if line.ends_with(program) && u64::from_str_radix(offset, 16) == Ok(0) {
            let (start, _) = range.split_once('-').context("a mapping")?;
            return u64::from_str_radix(start, 16).context("a mapping");
        }
    }
    bail!("{program} is not mapped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    extern "C" fn landmark() -> u64 {
        std::hint::black_box(0x1234_5678)
    }

    // Our own program. Expect: a function is found where it runs, a flip changes this process's copy and not the file's.
    #[test]
    fn functions_are_found_and_flips_stay_private() {
        let program = Program::read(Path::new("/proc/self/exe")).unwrap();
        let text = Text::of_program(std::process::id().cast_signed(), &program).unwrap();
        let here = landmark as *const () as u64;
        let found = program
            .functions
            .iter()
            .find(|f| text.address(f.address) == here);
        let found = found.unwrap();
        assert!(found.name.contains("landmark"), "{}", found.name);
        assert_eq!(landmark(), 0x1234_5678);
        let mut before = vec![0; found.bytes as usize];
        text.read(here, &mut before).unwrap();
        // The constant's lowest bit.
        let at = before
            .windows(4)
            .position(|w| w == 0x1234_5678u32.to_le_bytes())
            .unwrap();
        assert_eq!(text.flip(here + at as u64, 0).unwrap(), 0x78);
        assert_eq!(landmark(), 0x1234_5679);
        text.flip(here + at as u64, 0).unwrap();
        assert_eq!(landmark(), 0x1234_5678);
        let mut child = std::process::Command::new("/proc/self/exe")
            .arg("--list")
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_first_page_is_found() {
        let maps =
            "55d0-55e0 r--p 00000000 fd:00 7 /bin/x y\n55e0-55f0 r-xp 00010000 fd:00 7 /bin/x y\n";
        assert_eq!(load_address(maps, "/bin/x y").unwrap(), 0x55d0);
        assert!(load_address(maps, "/bin/z").is_err());
    }
}
