#include "program/printable.h"

#include <string>

#include <gtest/gtest.h>

namespace snug::cli::printable_test {
namespace {

TEST(Printable, LeavesTextOfAnyLanguageAsItIs) {
  for (const char* text : {"", "plain 'text' \\", "Überbreite ±µ ÿ", "漢字", "😀", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(printable("\x1b[31mred"), "\\x1b[31mred");
  EXPECT_EQ(printable("a\nsnug: b\r\a\x7f"), "a\\nsnug: b\\x0d\\x07\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\u009b31m"), "\\xc2\\x9b31m");               // the same as ESC [
  EXPECT_EQ(printable("\u202eexe.txt"), "\\xe2\\x80\\xaeexe.txt");  // from right to left
}

TEST(Printable, ShowsBytesThatAreNoUtf8) {
  EXPECT_EQ(printable("\xff\xfe"), "\\xff\\xfe");
  EXPECT_EQ(printable("\xc3"), "\\xc3");           // cut
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");  // ESC, longer than needed
  EXPECT_EQ(printable("\xe0\x82\x9b"), "\\xe0\\x82\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // half of a pair of UTF-16
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

}  // namespace
}  // namespace snug::cli::printable_test
