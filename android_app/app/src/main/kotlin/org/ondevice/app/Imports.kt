package org.ondevice.app

import android.content.Context
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.OpenableColumns
import org.ondevice.core.ErrorKind
import org.ondevice.core.OndeviceException
import java.io.IOException
import java.io.InputStream

/** Reads what another app lends: one document, or a folder with all that is in it. */
class Imports(private val context: Context, private val foreign: Foreign) {
    /** A document's name as its owner calls it. */
    fun name(uri: Uri): String {
        val found = foreign.ask {
            context.contentResolver.query(uri, arrayOf(OpenableColumns.DISPLAY_NAME), null, null, null, foreign.signal)?.use { cursor ->
                if (cursor.moveToFirst() && !cursor.isNull(0)) cursor.getString(0) else null
            }
        }
        return (found ?: uri.lastPathSegment?.substringAfterLast('/') ?: "unnamed").take(MOST_NAME)
    }

    fun open(uri: Uri): InputStream = foreign.stream {
        context.contentResolver.openInputStream(uri) ?: throw IOException("the picked document cannot be opened: $uri")
    }

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
        ArrayList<Pair<String, () -> InputStream>>().also { walk(tree, DocumentsContract.getTreeDocumentId(tree), "", 0, it) }

    fun treeName(tree: Uri): String = DocumentsContract.getTreeDocumentId(tree).substringAfterLast('/').substringAfterLast(':').ifEmpty { "model" }

    /** Another app's folder may hold itself, or go on for ever: an artifact is a few files in a few folders. */
    private fun walk(tree: Uri, parent: String, prefix: String, depth: Int, found: MutableList<Pair<String, () -> InputStream>>) {
        for (child in foreign.ask { children(tree, parent, MOST_FILES - found.size) }) {
            val name = prefix + child.name
            if (!child.isFolder) {
                found.add(name to { open(DocumentsContract.buildDocumentUriUsingTree(tree, child.id)) })
            } else if (depth < MOST_DEPTH) {
                walk(tree, child.id, "$name/", depth + 1, found)
            } else {
                throw tooLarge("folders in folders $MOST_DEPTH deep", name.take(MOST_NAME))
            }
        }
    }

    private class Child(val id: String, val name: String, val isFolder: Boolean)

    private fun children(tree: Uri, parent: String, most: Int): List<Child> {
        val columns = arrayOf(
            DocumentsContract.Document.COLUMN_DOCUMENT_ID,
            DocumentsContract.Document.COLUMN_DISPLAY_NAME,
            DocumentsContract.Document.COLUMN_MIME_TYPE,
        )
        val children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, parent)
        val cursor = context.contentResolver.query(children, columns, null, null, null, foreign.signal)
            ?: throw IOException("the picked folder cannot be listed: $tree")
        val found = ArrayList<Child>()
        cursor.use {
            while (it.moveToNext()) {
                if (found.size == most) throw tooLarge("$MOST_FILES files", "more")
                val id: String? = it.getString(0)
                val name: String? = it.getString(1)
                if (id == null || name == null) throw IOException("the picked folder has a file without a name: $tree")
                found.add(Child(id, name, it.getString(2) == DocumentsContract.Document.MIME_TYPE_DIR))
            }
        }
        return found
    }

    private fun tooLarge(most: String, received: String) =
        OndeviceException(ErrorKind.ARTIFACT, "the picked folder is not an artifact's", "at most $most", received, "choose the artifact's folder")

    private companion object {
        const val MOST_NAME = 200
        const val MOST_FILES = 1000
        const val MOST_DEPTH = 4
    }
}
