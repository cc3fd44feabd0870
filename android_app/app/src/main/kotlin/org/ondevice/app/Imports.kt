package org.ondevice.app

import android.content.Context
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.OpenableColumns
import java.io.IOException
import java.io.InputStream

/** Reads what the user chose in the system's picker: one document, or a folder with all that is in it. */
class Imports(private val context: Context) {
    /** A document's name as its owner calls it. */
    fun name(uri: Uri): String {
        val found = context.contentResolver.query(uri, arrayOf(OpenableColumns.DISPLAY_NAME), null, null, null)?.use { cursor ->
            if (cursor.moveToFirst() && !cursor.isNull(0)) cursor.getString(0) else null
        }
        return found ?: uri.lastPathSegment?.substringAfterLast('/') ?: "unnamed"
    }

    fun open(uri: Uri): InputStream = context.contentResolver.openInputStream(uri)
        ?: throw IOException("the picked document cannot be opened: $uri")

    /** The bytes of a document that is known to be small; null where it has more than [most]. */
    fun small(uri: Uri, most: Int): ByteArray? = open(uri).use { stream ->
        val bytes = ByteArray(most + 1)
        var size = 0
        while (size < bytes.size) {
            val count = stream.read(bytes, size, bytes.size - size)
            if (count < 0) break
            size += count
        }
        if (size > most) null else bytes.copyOf(size)
    }

    /** Every file below a picked folder: its relative name, and how to open it. */
    fun files(tree: Uri): List<Pair<String, () -> InputStream>> =
        ArrayList<Pair<String, () -> InputStream>>().also { walk(tree, DocumentsContract.getTreeDocumentId(tree), "", it) }

    fun treeName(tree: Uri): String = DocumentsContract.getTreeDocumentId(tree).substringAfterLast('/').substringAfterLast(':').ifEmpty { "model" }

    private fun walk(tree: Uri, parent: String, prefix: String, found: MutableList<Pair<String, () -> InputStream>>) {
        val children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, parent)
        val columns = arrayOf(
            DocumentsContract.Document.COLUMN_DOCUMENT_ID,
            DocumentsContract.Document.COLUMN_DISPLAY_NAME,
            DocumentsContract.Document.COLUMN_MIME_TYPE,
        )
        val cursor = context.contentResolver.query(children, columns, null, null, null)
            ?: throw IOException("the picked folder cannot be listed: $tree")
        cursor.use {
            while (it.moveToNext()) {
                val id = it.getString(0)
                val name = prefix + it.getString(1)
                if (it.getString(2) == DocumentsContract.Document.MIME_TYPE_DIR) {
                    walk(tree, id, "$name/", found)
                } else {
                    found.add(name to { open(DocumentsContract.buildDocumentUriUsingTree(tree, id)) })
                }
            }
        }
    }
}
