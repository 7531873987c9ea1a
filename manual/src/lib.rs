//! Man pages and shell completions, written by the program they are about (`PROGRAM manual DIRECTORY`, for packagers): they can say
//! nothing that `--help` does not.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// The shells with completions.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes the pages of a program and of each of its commands (`portolan.1`, `portolan-ping.1`), and its completions, into a directory.
///
/// # Errors
/// The file system's.
pub fn write(command: Command, section: u8, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let name = command.get_name().to_owned();
    let mut whole = command.clone();
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut whole, &name, directory)?;
    }
    whole.build();
    let source = format!("{name} {}", command.get_version().unwrap_or_default());
    pages(&whole, &name, source.trim(), section, directory)
}

fn pages(
    command: &Command,
    name: &str,
    source: &str,
    section: u8,
    directory: &Path,
) -> io::Result<()> {
    for sub in visible(command) {
        pages(
            sub,
            &format!("{name}-{}", sub.get_name()),
            source,
            section,
            directory,
        )?;
    }
    // A page's name is the program's or, for a command, both joined: as git(1) and its kin have it.
    let page = Man::new(command.clone().display_name(name))
        .title(name.to_uppercase())
        .section(section.to_string())
        .source(source)
        .manual("Portolan");
    let mut text = Vec::new();
    page.render(&mut text)?;
    fs::write(directory.join(format!("{name}.{section}")), text)
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    let all = command.get_subcommands();
    all.filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_for_each_command_and_completions_for_each_shell() {
        let directory = tempfile::tempdir().unwrap();
        let command = Command::new("tool")
            .about("Does things")
            .subcommand(Command::new("dig").about("Digs"))
            .subcommand(Command::new("secret").hide(true));
        write(command, 1, directory.path()).unwrap();
        let mut names: Vec<String> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["_tool", "tool-dig.1", "tool.1", "tool.bash", "tool.fish"]
        );
        let page = fs::read_to_string(directory.path().join("tool-dig.1")).unwrap();
        assert!(
            page.contains(".TH TOOL-DIG 1") && page.contains("Digs"),
            "{page}"
        );
        let page = fs::read_to_string(directory.path().join("tool.1")).unwrap();
        assert!(
            page.contains("tool\\-dig(1)") && !page.contains("secret"),
            "{page}"
        );
    }
}
