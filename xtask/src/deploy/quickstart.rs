//! The commands of docs/quickstart.md, as they stand there: fenced blocks marked `sh,both`, `sh,node1` or `sh,node2`, one command each.

use anyhow::{Result, bail};

/// The page.
pub const PAGE: &str = "docs/quickstart.md";
/// How many commands a machine may need.
const MOST: usize = 4;

/// The commands of the first and the second machine, in order.
pub fn commands(page: &str) -> Result<[Vec<String>; 2]> {
    let mut all = [Vec::new(), Vec::new()];
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(whose) = line.strip_prefix("```sh,") else {
            continue;
        };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        let text = block.join("\n");
        let ends = block.iter().filter(|line| !line.ends_with('\\')).count();
        if ends != 1 {
            bail!("{PAGE}: not one command:\n{text}");
        }
        for (node, commands) in ["node1", "node2"].iter().zip(&mut all) {
            if whose == *node || whose == "both" {
                commands.push(text.clone());
            }
        }
    }
    for commands in &all {
        if commands.is_empty() || commands.len() > MOST {
            bail!(
                "{PAGE}: {} commands for a machine where 1 to {MOST} are promised",
                commands.len()
            );
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_at_most_four_commands_for_each_machine() {
        let page = std::fs::read_to_string(crate::steps::root().join(PAGE)).unwrap();
        let [first, second] = commands(&page).unwrap();
        assert_eq!((first.len(), second.len()), (4, 4));
        assert_eq!(first.first(), second.first());
        assert!(first[3].starts_with("portolan ping"), "{first:?}");
    }

    #[test]
    fn a_fifth_command_or_two_in_one_block_are_too_many() {
        let block = "```sh,both\ntrue\n```\n";
        assert!(commands(&block.repeat(4)).is_ok());
        assert!(commands(&block.repeat(5)).is_err());
        assert!(commands("```sh,both\ntrue\ntrue\n```\n").is_err());
        assert!(commands("").is_err());
    }
}
