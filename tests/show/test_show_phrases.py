"""What notebooks print: in lines that a page shows whole."""

from tplab import show


def test_what_is_said_is_no_wider_than_a_page_and_special_tokens_stay_whole(capsys):
    show.say("answer:", "<|endoftext|>" * 12)
    show.say("a word " * 30 + "\n    " + "code " * 30)
    show.say("short")
    show.say()
    show.say("a", 2, sep="-")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["answer: " + "<|endoftext|>" * 7, "  " + "<|endoftext|>" * 5]
    assert max(map(len, said[:-4])) <= 100 and said[-4:] == ["    " + "code " * 30, "short", "", "a-2"]
    assert " ".join(" ".join(said[2:-4]).split()) == " ".join(["a word"] * 30)
