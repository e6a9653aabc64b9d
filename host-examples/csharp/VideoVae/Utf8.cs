using System;
using System.Text;

namespace VideoVae
{
    /// <summary>Texts of the library are UTF-8 on every system; the runtime's own marshalling is not.</summary>
    internal static unsafe class Utf8
    {
        /// <summary>With the NUL that C wants. Null stays null, which `fixed` turns into NULL.</summary>
        public static byte[] Bytes(string text)
        {
            if (text == null) return null;
            if (text.IndexOf('\0') >= 0) throw new ArgumentException("a text must not contain a NUL");
            var bytes = new byte[Encoding.UTF8.GetByteCount(text) + 1];
            Encoding.UTF8.GetBytes(text, 0, text.Length, bytes, 0);
            return bytes;
        }

        public static string Text(byte* text)
        {
            return text == null ? null : Text(text, int.MaxValue);
        }

        /// <summary>The text in an array of at most <paramref name="capacity"/> bytes.</summary>
        public static string Text(byte* text, int capacity)
        {
            int length = 0;
            while (length < capacity && text[length] != 0) length++;
            return Encoding.UTF8.GetString(text, length);
        }
    }
}
